"""Jobs of a queue as configurations, and the other way round."""
