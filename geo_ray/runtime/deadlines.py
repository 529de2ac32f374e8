"""How long each party of a step waits: who knows more about a cause gives up first.

The bridge waits ``train.step_timeout_s`` for the averager, the lead a little longer for the bridge,
and a worker longest: for its own region's step and then for an exchange. So the error that ends a
run names the region and the phase, and not just a silent socket.
"""

from __future__ import annotations

from typing import Final

_SLACK_S: Final = 5.0


def exchange_s(step_timeout_s: float) -> float:
    """How long a lead waits for its bridge, seconds."""
    return step_timeout_s + _SLACK_S


def answer_s(step_timeout_s: float) -> float:
    """How long a worker waits for its lead, seconds."""
    return step_timeout_s + exchange_s(step_timeout_s) + _SLACK_S
