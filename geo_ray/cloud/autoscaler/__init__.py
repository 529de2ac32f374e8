"""The autoscaler: what should run, at the least cost, with nothing left behind."""
