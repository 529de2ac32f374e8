"""A cluster that makes itself: what should run, at the least cost, and nothing left behind."""
