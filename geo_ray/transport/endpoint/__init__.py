"""Reliable messages between regions: connections, sessions, chunks and lanes."""
