"""The autoscaler on a Ray cluster: its actor, its view of nodes, of what waits, and of the job."""
