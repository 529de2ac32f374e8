"""The averager as a state machine, its log, its standby and how that takes over."""
