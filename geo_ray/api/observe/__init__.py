"""A run as others see it: a live page, its events in other programs."""
