"""What several strategies share, one idea per file."""
