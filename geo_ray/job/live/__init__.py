"""What is shown of a run while it goes on: read from its directory, or its bucket."""
