"""Who gets what in each slot: one policy a file."""
