"""The relay's process: links, queues, loss and delay."""
