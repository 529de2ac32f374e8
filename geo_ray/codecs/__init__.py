"""Codecs: compress a vector into a payload and decode it again.

One codec per file. `base` defines the interface, `registry` lists all codecs by name,
`feedback` adds error feedback.
"""
