"""The model of time and money for a choice of machines and exchanges, term by term."""
