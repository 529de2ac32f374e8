"""The ways of an update from its server to the averager and back."""
