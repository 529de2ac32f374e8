"""What waits for a place, counted in machines, and what is decided by it alone."""
