"""Storage: directories, S3-compatible buckets, and checkpoints in either."""
