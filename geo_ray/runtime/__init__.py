"""Real runs on Ray: the controller, its policies, and the worker, server and bridge actors."""
