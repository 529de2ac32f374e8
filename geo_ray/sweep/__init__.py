"""Sweeps: comparisons, searches and profiles of many runs of one workload."""
