"""Join a run from a training loop of your own: own optimizer, data, precision and parallelism."""
