"""What is known of pools: what they cost, how often they take back, which are left alone."""
