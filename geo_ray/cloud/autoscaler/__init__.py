"""The autoscaler: keeps the machines that a job needs at the lowest cost, and ends all others."""
