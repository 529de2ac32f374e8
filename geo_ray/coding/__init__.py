"""Coded computation: redundancy that lets a sum, a product or a shuffle do without the slowest."""
