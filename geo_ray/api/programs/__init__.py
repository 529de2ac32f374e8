"""The job as a program: `geo_ray.run_program`, `price_program` and `training_program`."""
