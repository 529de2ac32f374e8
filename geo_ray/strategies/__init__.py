"""Synchronization strategies: how regions combine their models.

One strategy per file, each a frozen configuration with a few pure methods. `base` defines the
interface, `state` the messages and the state that strategies work on, `registry` lists all
strategies by name.
"""
