"""The driver: starts a run, watches it, saves, stops."""
