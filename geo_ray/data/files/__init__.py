"""Reading a user's own files: discovery, file formats, and rows as Arrow columns."""
