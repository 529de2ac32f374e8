"""Measuring what intervals and codecs cost in loss: of what task, which runs, which file."""
