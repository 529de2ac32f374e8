"""Scheduling policies, one per file; `registry` finds them by name."""
