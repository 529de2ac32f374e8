"""From the columns of a user's files to the columns of a task."""
