"""What is looked at, and said, before a run starts."""
