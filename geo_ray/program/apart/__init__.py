"""Nodes in processes of their own: how they are shipped, and how they reach each other."""
