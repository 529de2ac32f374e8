"""Transports of an update from a bridge to the averager and of the answer back."""
