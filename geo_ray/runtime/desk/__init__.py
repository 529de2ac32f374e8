"""Parts of checkpoints from and to machines that do not see the run's directory."""
