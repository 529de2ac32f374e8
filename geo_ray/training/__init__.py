"""The training plane: worker, parameter server and averager as pure state machines.

No Ray, clock or socket: the runtime drives them over the network, the simulator on a virtual
clock.
"""
