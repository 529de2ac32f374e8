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
