"""The Ray cluster of a run: connecting, checks, placement, labels, actor calls and keys.

The only package that uses Ray internals.
"""
