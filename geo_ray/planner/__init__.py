"""Plan which machines run where and how often regions exchange updates.

Pure, and without PyTorch.
"""
