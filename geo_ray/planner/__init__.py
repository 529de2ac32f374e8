"""Planning: which machines run where, and how often regions exchange updates.

The package is pure and does not import PyTorch.
"""
