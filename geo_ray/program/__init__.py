"""Programs of nodes and handles, run in threads, as processes, on Ray or on virtual time."""
