"""Who takes part in a run, and how few regions may be left of it."""
