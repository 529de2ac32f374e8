"""geo_ray as a library: what each verb of the command line does, as a function with a value."""
