"""Clusters from an empty account to the bill and back to nothing: made, shown, ended."""
