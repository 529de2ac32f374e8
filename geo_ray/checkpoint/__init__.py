"""Checkpoints: many processes each write a part, one manifest commits them all or none."""
