"""Who owns a run's processes: its driver, or a steward, with which they outlive a driver."""
