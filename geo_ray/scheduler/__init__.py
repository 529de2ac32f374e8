"""Scheduling of many jobs on one shared cluster: admission, placement, prices and a live queue."""
