"""The Ray cluster of a run: found or made, checked, its nodes and places."""
