"""The WAN lab: network namespaces joined by a userspace relay, for real TCP over an emulated WAN.

`geo_ray.lab.lab.Lab` is the entry for Python, `geo-ray lab` the one for the shell. Modules up to
`mesh.py` are pure: explicit times, no clock, no socket. `relay.py` executes them; the relay's
process imports only the standard library.
"""
