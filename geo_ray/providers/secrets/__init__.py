"""Secrets of a cluster, kept in a cloud's own store."""
