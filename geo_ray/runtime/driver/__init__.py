"""A run's driver on a cluster that was there before it: an actor, and processes that watch it."""
