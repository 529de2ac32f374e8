"""Many jobs on one shared cluster: who is admitted, what runs where and when, and what it costs."""
