"""geo_ray as a library: each command as a function that returns a value."""
