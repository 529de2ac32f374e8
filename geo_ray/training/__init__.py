"""The training plane as pure state machines: worker, parameter server, averager.

No clock, no socket, no Ray: `geo_ray.runtime` runs them on actors, `geo_ray.sim` on a virtual
clock.
"""
