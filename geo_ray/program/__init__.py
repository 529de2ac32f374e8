"""The job as a program: nodes and handles, run in threads, as processes, on Ray or simulated."""
