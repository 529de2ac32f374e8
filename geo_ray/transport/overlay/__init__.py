"""Overlays: how bridges sum a round's updates on the way and distribute the result."""
