"""The queue on a Ray cluster: its actor, the job server, runs, and what nodes have."""
