"""The live queue as functions."""
