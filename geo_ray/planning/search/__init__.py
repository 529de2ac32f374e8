"""The search for the best plan."""
