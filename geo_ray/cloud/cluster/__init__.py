"""Clusters: created, shown and taken down, from an empty account to the bill and back."""
