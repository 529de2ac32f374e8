"""A user's own files: which there are in a folder, and their rows as Arrow columns."""
