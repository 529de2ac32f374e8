"""Whether a new driver can go on with the processes of the one before. Pure.

It can where nothing was under way that only the driver before knew of. Everything else that it
knew is in the steward's book, in the run's log, or told by the processes themselves. Where it
cannot, the processes end, and the run goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from geo_ray.training.membership.view import View

_ENDING: Final = frozenset({"stop_requested", "run_finished", "run_failed"})
_ENDED: Final = frozenset({"run_finished", "run_failed"})
_HEARD_S: Final = 5.0  # within which a steward has heard of a driver that lives
_STILL: Final = frozenset({"starting", "halted"})


@dataclass(frozen=True, slots=True)
class Living:
    """What is seen of a run's processes.

    Attributes:
        same_configuration: whether they have the one that is asked for.
        is_changing: whether the driver before was changing members.
        view: the averager's; None where there is none, or it does not answer.
        phases: of the regions whose servers answer.
        told: kinds of events since the run last began.
        uses_desk: whether any process sends its parts to the machine of the driver before.
    """

    same_configuration: bool
    is_changing: bool
    view: View | None
    phases: Mapping[str, str]
    told: Collection[str]
    uses_desk: bool = False


def why_anew(living: Living) -> str | None:
    """Why a new driver begins anew from a checkpoint; None: it goes on with what is there."""
    if not living.same_configuration:
        return "another configuration is asked for"
    if not living.phases:
        return "no parameter server answers"
    if _ENDING.intersection(living.told):
        return "it was about to end"
    if living.uses_desk:
        return "some of them send their parts of checkpoints to the driver before"
    if living.is_changing or (living.view is not None and living.view.joining):
        return "its members were changing"
    still = sorted(name for name, phase in living.phases.items() if phase in _STILL)
    if still:
        return f"region '{still[0]}' was standing still"
    return None


def why_gone(told: Collection[str], patience_s: float | None, silent_s: float | None) -> str | None:
    """Why there are no processes to go on with; None: the driver before has ended the run itself.

    Args:
        told: kinds of events since the run last began.
        patience_s: for how long they wait for a driver; None: they end with theirs.
        silent_s: since the driver before last wrote something; None: not known.
    """
    if _ENDED.intersection(told):
        return None
    if patience_s is None:
        return "they ended with their driver"
    if silent_s is not None and silent_s >= patience_s - _HEARD_S:
        return f"nobody drove it for {patience_s:g} s, so they have ended"
    return "they have ended: a machine of theirs, or its Ray, may be gone"
