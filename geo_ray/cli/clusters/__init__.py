"""Verbs that make, show and end clusters."""
