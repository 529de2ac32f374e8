"""Foundations that every package may import.

Errors, the strict configuration model, clocks, identifiers and small utilities. This package
imports no other package of geo_ray.
"""
