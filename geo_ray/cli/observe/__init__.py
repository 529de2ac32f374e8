"""Commands that show a run, or hand on what it tells."""
