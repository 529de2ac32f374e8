"""What a shared cluster and its jobs are, and what a schedule must keep to."""
