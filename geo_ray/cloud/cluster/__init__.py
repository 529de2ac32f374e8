"""Clusters: creation, status and deletion."""
