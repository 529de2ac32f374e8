"""Requests inside a region: sockets, and shared memory on one host."""
