"""Measures a link by sending over it."""
