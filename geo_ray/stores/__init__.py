"""Where shards lie: directories and buckets."""
