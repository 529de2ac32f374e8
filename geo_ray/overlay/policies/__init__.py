"""Who sends which part of a round to whom: one policy per file."""
