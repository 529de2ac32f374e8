"""Notices that a machine is taken away, as its cloud's metadata service tells them."""
