"""The relay's process and everything in it: links, queues, loss, delay."""
