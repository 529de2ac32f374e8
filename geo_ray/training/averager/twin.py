"""A second averager with the same state: what a standby begins with in the middle of a run.

A checkpoint's part is nearly that. It leaves out what a resumed run begins anew: which members are
about to change or not there yet, which answers ask for a copy of the state, who was told of the
newest checkpoint. Two averagers of which one is such a copy give the same answers from there on.

Meeting others: who is not settled after a takeover (`SnapshotMarks`) is left out. Only the averager
at home asks for that, before it puts the beginning of a checkpoint into the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch import Tensor

from geo_ray.errors import CheckpointCorruptError
from geo_ray.strategies.base import Border, Reply
from geo_ray.training.averager.averager import Averager
from geo_ray.training.membership.border import MemberChange
from geo_ray.training.membership.view import View

_ASKS = ("stop", "checkpoint", "halt", "closing", "gather", "view")  # of an answer's receiver


@dataclass(frozen=True, slots=True)
class AveragerTwin:
    """A copy of an averager's state: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    control: dict[str, object]


def twin_of(averager: Averager) -> AveragerTwin:
    """Copy all of an averager's state; it works, and goes on meanwhile as it likes."""
    tensors, control = averager.export()
    books, change, view = averager._books, averager._change, averager.view
    control["exact"] = {
        "view": {name: _plain(value) for name, value in asdict(view).items()},
        "change": None if change is None else {k: _plain(v) for k, v in asdict(change).items()},
        "asks": {region: _asked(reply) for region, reply in books.answers.items()},
        "marks": averager._marks.export(),
        "ending": averager._ending.export_exact(),
    }
    return AveragerTwin({name: value.clone() for name, value in tensors.items()}, control)


def become_twin(averager: Averager, twin: AveragerTwin) -> None:
    """Let an averager that has done nothing yet become what `twin_of` copied.

    Raises:
        CheckpointCorruptError: it makes no sense.
        ConfigDriftError: it is that of a run with other codecs.
    """
    averager.restore(twin.tensors, twin.control)
    try:
        exact = cast(Mapping[str, Any], twin.control["exact"])
        averager.view = View(**{name: _tuples(value) for name, value in exact["view"].items()})
        averager.state.members = averager.view.members
        change = exact["change"]
        if change is not None:
            change = MemberChange(**{name: _tuples(value) for name, value in change.items()})
        averager._change = change
        answers = averager._books.answers
        for region, asks in exact["asks"].items():
            border = None if asks["border"] is None else Border(**asks["border"])
            told = {name: asks[name] for name in _ASKS}
            answers[region] = replace(answers[region], border=border, **told)
        averager._marks.restore(exact["marks"])
        averager._ending.restore_exact(exact["ending"])
        averager.state.now_s = float(str(twin.control["now_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"a copy of the averager cannot be read: {error!r}") from error


def _asked(reply: Reply) -> dict[str, object]:
    border = None if reply.border is None else asdict(reply.border)
    return {name: getattr(reply, name) for name in _ASKS} | {"border": border}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _tuples(value: object) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
