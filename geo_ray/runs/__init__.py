"""Runs: directory, lease, configuration to objects, evaluation, resumption, plans and status."""
