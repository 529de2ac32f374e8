"""Overlays: how bridges sum a round's updates on the way and hand the result out."""
