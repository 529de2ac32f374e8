"""Measurements of links, as records in a table and a file."""
