"""The WAN lab: network namespaces joined by a userspace relay, for real TCP over a made-up WAN.

`geo_ray.lab.lab.Lab` is the entry for Python, `geo-ray lab` the one for the shell. Modules up to
`mesh` are pure: explicit times, no clock, no socket. `relay` and what stands beside it execute
them; the relay's process imports nothing beyond the standard library.
"""
