"""The question of a plan: what a job, its regions and their machines are."""
