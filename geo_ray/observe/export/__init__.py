"""A run's events to other programs: traces, scalars. Whatever becomes of it, the run goes on."""
