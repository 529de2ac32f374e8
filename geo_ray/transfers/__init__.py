"""Scheduled transfers: order on the bottleneck, bounded staleness, helper regions."""
