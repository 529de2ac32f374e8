"""Event kinds of a run and the fields of each.

One line of `events.jsonl` is one JSON object ``{"t_s": ..., "kind": ..., ...}``. ``t_s`` is in
seconds since the run began. Every field of a kind is required. A field of `OPTIONAL_FIELDS` may
be missing, and is checked if present; additional fields are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, TypeAlias

from geo_ray.base.errors import InvariantError

Check: TypeAlias = Callable[[Any], Any]  # gives the JSON value back, or raises TypeError
_MOST_WHOLE: Final = 10**18  # limit of numbers that are summed and divided
TIMES: Final = ("t_s", "start_s")
"""What an event has of the run's clock; other fields in seconds are durations."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run.

    Attributes:
        kind: one of `EVENT_FIELDS`, or a kind of a newer release when read from a file.
        t_s: seconds since the run began; virtual seconds in a simulated run.
        fields: all other fields, as JSON values.
    """

    kind: str
    t_s: float
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Give the field ``name``; KeyError if the event has none."""
        return self.fields[name]

    def number(self, name: str) -> float:
        """Give the field ``name`` as a float; NaN if it was not finite when written."""
        value = self.fields[name]
        return math.nan if value is None else float(value)


class RunObserver:
    """Receives the progress of a run; this base class ignores it."""

    def status(self, text: str) -> None:
        """Receive the name of the phase that begins."""

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        """Receive the progress of a start-up phase; called repeatedly."""

    def on_event(self, event: Event) -> None:
        """Receive a written event. An exception ends the run."""

    def check(self) -> None:
        """Raise the error that ends the run at once, if there is one."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:  # fast path; checking `Integral` takes ten times as long
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError("a whole number")
        value = int(value)
    number: int = value
    if not -_MOST_WHOLE <= number <= _MOST_WHOLE:
        raise TypeError(f"a whole number up to {_MOST_WHOLE:.0e}")
    return number


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value if math.isfinite(value) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError("a number")
    try:
        number = float(value)
    except OverflowError:
        raise TypeError("a number that a float can hold") from None
    return number if math.isfinite(number) else None


def _finite_number(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise TypeError("a finite number")
    return number


def _mode(value: Any) -> str:
    if value not in ("min", "max"):
        raise TypeError("min or max")
    return str(value)


def _name(value: Any) -> str | int:
    return value if isinstance(value, str) else _whole(value)


def _or_null(check: Check) -> Check:
    def checked(value: Any) -> Any:
        return None if value is None else check(value)

    return checked


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple):
        raise TypeError("a list of strings")
    return [_text(item) for item in value]


def _table(check: Check) -> Check:
    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError("an object")
        return {_text(key): check(item) for key, item in value.items()}

    return checked


def finite(value: Any) -> Any:
    """Give a JSON value with every non-finite float replaced by None.

    Raises:
        TypeError: the value cannot be represented in JSON.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {_text(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    return _number(value)


EVENT_FIELDS: Mapping[str, Mapping[str, Check]] = {
    "run_started": {
        "run": _text,
        "digest": _text,  # of the configuration
        "strategy": _text,
        "regions": _texts,
        "task": _text,
        "seed": _whole,
        "simulated": _flag,
    },
    "step": {
        "region": _text,
        "step": _whole,
        "samples": _whole,  # of this step alone
        "loss": _number,
        "compute_s": _number,
        "wait_s": _number,
        "start_s": _number,
    },
    "exchange": {
        "region": _text,
        "seq": _whole,
        "start_s": _number,
        "bytes_sent": _whole,
        "bytes_received": _whole,
        "blocking": _flag,
        "staleness": _number,
        "round": _or_null(_whole),
    },
    "update_dropped": {"region": _text, "seq": _whole, "bytes_sent": _whole},
    "eval": {
        "step": _whole,
        "region": _or_null(_text),
        "metrics": _table(_number),
        "samples": _whole,
    },
    "best_kept": {
        "step": _whole,
        "region": _or_null(_text),  # null: evaluated on the rows of all regions
        "metric": _text,
        "mode": _mode,
        "value": _finite_number,
        "samples": _whole,
        "metrics": _table(_number),
    },
    "best_failed": {"step": _whole, "cause": _text},
    "checkpoint": {"id": _name, "step": _whole, "bytes": _whole},
    "checkpoint_failed": {"cause": _text},
    "worker_lost": {"region": _text, "worker": _name, "cause": _text},
    "worker_requested": {"region": _text, "worker": _name, "attempt": _whole},  # a replacement
    "worker_started": {"region": _text, "worker": _name, "attempt": _whole},  # its process runs
    "worker_replaced": {"region": _text, "worker": _name, "attempt": _whole},  # it works
    "process_unresponsive": {"region": _text, "process": _text, "unresponsive_s": _number},
    "worker_left": {"region": _text, "worker": _name, "cause": _text},
    "active_workers": {  # who takes part, in regions that go on while workers are missing
        "region": _text,
        "step": _whole,
        "workers": _whole,
        "rows": _whole,  # of a step of theirs
    },
    "step_refused": {"region": _text, "step": _whole, "cause": _text},
    "state_changed": {"region": _text, "step": _whole, "how": _text, "names": _text},
    "device": {  # the GPU of a worker
        "region": _text,
        "worker": _name,
        "device": _text,
        "share": _number,
        "peak_bytes": _whole,
        "total_bytes": _whole,
    },
    "noise": {
        "region": _or_null(_text),  # null: of all regions together
        "step": _whole,
        "grad_sq": _number,
        "trace": _number,
        "rows": _whole,
        "workers": _whole,
        "count": _whole,
    },
    "region_lost": {"region": _text, "cause": _text},
    "run_paused": {"cause": _text},
    "run_resumed": {},
    "bridge_requested": {"region": _text, "cause": _text},
    "bridge_replaced": {"region": _text, "cause": _text, "took_s": _number},
    "run_actor_attached": {"token": _whole, "downtime_s": _number},
    "region_drained": {"region": _text, "cause": _text},  # "asked" or "notice"
    "members_accepted": {"verb": _text, "region": _text, "request": _text},
    "members_refused": {"verb": _text, "region": _text, "cause": _text},
    "region_joining": {"region": _text},  # its processes are being started
    "region_started": {"region": _text, "took_s": _number},  # they run; it joins at a barrier
    "join_failed": {"region": _text, "cause": _text},
    "region_joined": {
        "region": _text,
        "view": _whole,
        "round": _whole,
        "step": _whole,
        "bytes": _whole,
        "took_s": _number,
    },
    "replanned": {  # a run that follows a plan: what is best for those who take part now
        "regions": _texts,
        "changed": _flag,
        "cause": _text,
        "gain": _number,
        "interval": _whole,
        "averager": _text,
        "seconds": _number,
        "usd": _number,
    },
    "interval_changed": {  # as the run goes, because others take part
        "regions": _texts,
        "before": _whole,
        "interval": _whole,
        "cause": _text,
        "gain": _number,
    },
    "averager_moves": {  # a request: the set of regions changed
        "regions": _texts,
        "before": _text,
        "averager": _text,
        "cause": _text,
        "gain": _number,
    },
    "region_left": {"region": _text, "name": _text},  # the averager's region; the region that left
    "averager_moved": {"region": _text, "term": _whole},  # the averager lives there now
    "standby_ready": {"region": _text, "name": _text, "term": _whole},  # it may take over
    "server_replaced": {"address": _text, "term": _whole, "took_s": _number, "cause": _text},
    "server_standby_ready": {"address": _text, "term": _whole},  # it may take over
    "server_standby_lost": {"address": _text, "cause": _text},
    "stop_requested": {"cause": _text},
    "wan": {"src": _text, "dst": _text, "bytes_by_class": _table(_whole)},
    "run_finished": {"summary": _table(finite)},
    "run_failed": {"code": _text, "message": _text, "fix": _text},
}

OPTIONAL_FIELDS: Mapping[str, Mapping[str, Check]] = {
    "run_started": {
        "averager": _or_null(_text),
        "address": _text,
        "steps": _table(_whole),
        "links": _or_null(_text),
        "codec": _table(_or_null(_text)),
        "startup_s": _number,
        "cause": _or_null(_text),
        "tokens_per_row": _number,
        "flops_per_row": _number,
        "flops_estimated": _flag,
        "ranks": _table(_whole),
        "holders": _texts,  # addresses of further processes that hold slices
        "pid": _whole,  # of the process that serves the run
    },
    "server_replaced": {"pid": _whole},
    "server_standby_ready": {"pid": _whole},
    "step": {
        "learning_rate": _number,  # of the inner optimizer; null: it made no step
        "steps": _whole,  # behind this event, where regions exchange with a server
        "exchange_s": _number,  # of the exchange before, without the time that others took
    },
    "exchange": {"bytes_before": _or_null(_whole), "held_s": _number},
    "eval": {"final": _flag},
    "stop_requested": {"reason": _text},
}

FAULT_KINDS = (
    "worker_lost",
    "worker_replaced",
    "step_refused",
    "bridge_replaced",
    "region_lost",
    "state_changed",
)

REPAIR_KINDS = frozenset({"worker_replaced"})
"""Kinds of `FAULT_KINDS` that repair a fault counted before."""

MEMBER_KINDS = (  # membership events
    "run_started",
    "run_finished",
    "run_failed",
    "run_paused",
    "run_resumed",
    "region_lost",
    "region_drained",
    "region_joined",
    "worker_lost",
    "worker_left",
    "worker_replaced",
    "join_failed",
    "bridge_replaced",
    "run_actor_attached",
    "averager_moved",
    "server_replaced",
)


def conform(kind: str, t_s: float, fields: Mapping[str, Any]) -> Event:
    """Create an event, with its fields as plain JSON values.

    Args:
        kind: one of `EVENT_FIELDS`.
        t_s: seconds since the run began; finite.
        fields: every field of the kind; additional fields are kept.

    Raises:
        InvariantError: the kind is unknown, or a field is missing or has the wrong type.
    """
    known = EVENT_FIELDS.get(kind)
    if known is None:
        raise InvariantError(
            f"event of unknown kind {kind!r}; the kinds are {', '.join(EVENT_FIELDS)}"
        )
    if "t_s" in fields or "kind" in fields:
        raise InvariantError(f"event {kind!r} would overwrite its own t_s or kind")
    missing = [name for name in known if name not in fields]
    if missing:
        raise InvariantError(f"event {kind!r} lacks {', '.join(missing)}")
    if _number(t_s) is None:
        raise InvariantError(f"event {kind!r} has the time {t_s!r}")
    values: dict[str, Any] = {}
    optional = OPTIONAL_FIELDS.get(kind, {})
    for name, value in fields.items():
        try:
            values[name] = (known.get(name) or optional.get(name, finite))(value)
        except TypeError as error:
            raise InvariantError(
                f"event {kind!r}: {name} is {value!r} ({type(value).__name__}), not {error}"
            ) from None
    return Event(kind, float(t_s), values)
