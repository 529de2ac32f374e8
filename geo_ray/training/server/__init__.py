"""A region's parameter server as a state machine: steps, shards, sample books."""
