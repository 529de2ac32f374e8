"""Machines of AWS."""
