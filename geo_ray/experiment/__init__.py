"""The configuration of a run, composed from the sections of all packages."""
