"""The job as a program: `geo_ray.price_program` and `geo_ray.training_program`."""
