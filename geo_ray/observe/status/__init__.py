"""How a run stands, as another process sees it from the run's directory."""
