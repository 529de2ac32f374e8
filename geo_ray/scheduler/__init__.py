"""Scheduling of jobs on a shared cluster: admission, placement, pricing and a live queue."""
