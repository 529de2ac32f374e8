"""Emulated links: a model of a link, and shapers that delay real bytes by it."""
