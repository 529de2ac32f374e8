"""Prices of clouds: records, tiers, snapshots, and queries that refresh them."""
