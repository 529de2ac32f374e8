"""What a person is shown of a run, as values: made from its events, drawn by report and page."""
