"""Flow control: window, number of streams, and the estimate of what a link carries."""
