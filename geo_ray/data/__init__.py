"""Shards, their manifest, and how each region reads its own."""
