"""Replays histories of jobs on a shared cluster, slot by slot."""
