"""Values folded from events: metrics, totals, the summary."""
