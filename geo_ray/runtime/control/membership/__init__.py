"""Which regions take part in a run that goes on: requests, decisions, and how they are done."""
