"""Reliable messages between regions: connections, sessions, chunks, lanes."""
