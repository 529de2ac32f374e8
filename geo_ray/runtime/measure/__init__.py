"""Measurements on a cluster before a run: its links, and how fast a job is there."""
