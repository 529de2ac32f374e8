"""A day of spot prices and preemptions again, with other ways to rent machines beside ours."""
