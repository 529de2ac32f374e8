"""What a run says about itself: event log, metrics, progress, summary and report."""
