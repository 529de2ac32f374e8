"""Who may write to a run: a lease that one process holds at a time."""
