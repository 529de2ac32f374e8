"""Machines from clouds: providers, clusters, the autoscaler and its backtest."""
