"""Tasks: the Task protocol, loading a user's task, and the built-in workloads."""
