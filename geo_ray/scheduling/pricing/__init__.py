"""Prices of what is scarce, and the best schedule of a job at such prices."""
