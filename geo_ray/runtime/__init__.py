"""Real runs: the only package in which Ray lives."""
