"""Policies, which decide who sends which part of a round to whom: one policy per file."""
