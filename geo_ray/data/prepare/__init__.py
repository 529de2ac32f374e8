"""Preparation: turns the columns of a user's files into the columns of a task."""
