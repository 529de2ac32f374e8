"""Pages about runs: charts, tables, timelines."""
