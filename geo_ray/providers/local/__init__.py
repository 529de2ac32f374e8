"""This machine as a cloud: its machines are Ray nodes with addresses of their own."""
