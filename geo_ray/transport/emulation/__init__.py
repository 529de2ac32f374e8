"""Links that are not there: a model of one, and what holds real bytes back."""
