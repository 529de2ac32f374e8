"""The event log of a run: what an event may be, and how it is written and read."""
