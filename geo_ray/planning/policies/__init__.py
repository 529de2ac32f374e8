"""Planning policies, one per file."""
