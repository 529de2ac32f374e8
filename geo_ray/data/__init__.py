"""Training data: shards, manifest, preparation of a user's files, readers and tasks."""
