"""The neural networks of the built-in tasks."""
