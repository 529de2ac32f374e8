"""Backtests of the autoscaler: spot prices and preemptions of a day, with baselines."""
