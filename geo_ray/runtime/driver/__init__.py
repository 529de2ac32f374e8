"""Drivers of a run: in the user's process or as an actor, with attach and restart."""
