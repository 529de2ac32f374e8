"""A shard that lives elsewhere: the one list of what can be asked of it, and who asks.

A row says what an operation is called on the wire, which method carries it out, and how its
arguments and its result travel. `RemoteShard` asks by it, `ShardServer` answers by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.errors import InvariantError
from geo_ray.runtime.actors.parts import HeldShard
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    as_tensor,
    contributions_meta,
    read_contributions,
    read_reply,
    reply_meta,
)
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.server.pulls import Change, Pull
from geo_ray.training.server.shard import Contribution, Shard
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.record import Field, Record, Rows

As = TypeVarTuple("As")
H = TypeVar("H")
R = TypeVar("R")
Payload: TypeAlias = memoryview | None
Packed: TypeAlias = tuple[Meta, Payload]
Request: TypeAlias = tuple[
    Callable[[str, *As], Packed],  # the operation's name and its arguments
    Callable[[Meta, Payload], tuple[*As]],
]
Result: TypeAlias = tuple[Callable[[R], Packed], Callable[[Meta, Payload], R]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the list.

    Attributes:
        name: on the wire.
        run: a method of `Shard` or `HeldShard`.
        request: writes and reads the arguments.
        result: writes and reads the result.
    """

    name: str
    run: Callable[..., Any]
    request: Request[*tuple[Any, ...]]
    result: Result[Any]


def _row(
    name: str, run: Callable[[H, *As], R], request: Request[*As], result: Result[R]
) -> Operation:
    """A row whose method, arguments and result fit together."""
    return Operation(name, run, request, result)


def _read_step(meta: Meta, _: Payload) -> tuple[Sequence[Contribution], bool, float, float]:
    measure = fields.flag(meta, "measure")
    scale, rate = (fields.number(meta, k) if k in meta else 1.0 for k in ("scale", "rate"))
    return read_contributions(meta), measure, scale, rate


def _step(
    name: str, parts: Sequence[Contribution], measure: bool, scale: float = 1.0, rate: float = 1.0
) -> Packed:
    told = contributions_meta(parts) | {"op": name, "measure": measure}
    factors = {"scale": scale, "rate": rate}
    return told | {key: factor for key, factor in factors.items() if factor != 1.0}, None


def _outgoing(out: Outgoing | Wait | None) -> Packed:
    if isinstance(out, Outgoing):
        meta: Meta = {"said": "outgoing", "wait": out.wait, "fragment": out.fragment}
        return meta, as_bytes(out.payload_P)
    return {"said": "wait" if isinstance(out, Wait) else "nothing"}, None


def _read_outgoing(meta: Meta, payload: Payload) -> Outgoing | Wait | None:
    what = fields.text(meta, "said")
    if what == "outgoing":
        payload_S = torch.clone(as_tensor(payload))
        return Outgoing(payload_S, fields.flag(meta, "wait"), fields.count(meta, "fragment"))
    if what not in {"wait", "nothing"}:
        raise InvariantError(f"a shard server answered {what!r}")
    return Wait() if what == "wait" else None


_NOTHING: Request[*tuple[()]] = (lambda name: ({"op": name}, None), lambda *_: ())
_STEP: Request[Sequence[Contribution], bool, float, float] = (_step, _read_step)
_MEAN: Request[Sequence[Contribution]] = (
    lambda name, parts: (contributions_meta(parts) | {"op": name}, None),
    lambda meta, _: (read_contributions(meta),),
)
_REPLY: Request[Reply] = (
    lambda name, reply: (reply_meta(reply) | {"op": name}, as_bytes(reply.payload_P)),
    lambda meta, payload: (read_reply(meta, payload),),
)
_CHECKPOINT: Request[int] = (
    lambda name, checkpoint: ({"op": name, "id": checkpoint}, None),
    lambda meta, _: (fields.count(meta, "id"),),
)
_SHARE: Request[int] = (
    lambda name, share: ({"op": name, "share": share}, None),
    lambda meta, _: (fields.count(meta, "share"),),
)
_DONE: Result[None] = (lambda _: ({}, None), lambda *_: None)
_NORM: Result[float | None] = (
    lambda mean_sq: ({"mean_sq": mean_sq}, None),
    lambda meta, _: fields.optional_number(meta, "mean_sq"),
)
_OUTGOING: Result[Outgoing | Wait | None] = (_outgoing, _read_outgoing)
_PARAMS: Result[Tensor] = (
    lambda params_S: ({}, as_bytes(params_S.clone())),
    lambda _, payload: as_tensor(payload),
)
_PART: Result[PartInfo] = (
    lambda part: (dict(part.model_dump()), None),
    lambda meta, _: PartInfo.model_validate(meta),
)

OPERATIONS: Final = (
    _row("apply", Shard.apply, _STEP, _NORM),
    _row("mean_sq", Shard.mean_sq, _MEAN, _NORM),
    _row("keep", Shard.keep, _SHARE, _DONE),
    _row("speak", Shard.outgoing, _NOTHING, _OUTGOING),
    _row("finish", Shard.finish, _NOTHING, _OUTGOING),
    _row("merge", Shard.merge, _REPLY, _DONE),
    _row("snapshot", Shard.snapshot, _CHECKPOINT, _DONE),
    _row("params", Shard.live_params, _NOTHING, _PARAMS),
    _row("write_part", HeldShard.write_part, _CHECKPOINT, _PART),
)
"""What the primary shard may ask of the others. Workers push and pull slices beside it."""
_CHANGE: Final = Record(
    Change,
    "version=change",
    Field(
        "pulls",
        Rows(
            Record(Pull, "worker=pullers ticket=tickets version=pull_versions judged=pulls_judged")
        ),
    ),
)
_BY_METHOD: Final = {operation.run: operation for operation in OPERATIONS}


class RemoteShard:
    """See `geo_ray.training.server.region_model.ShardPort`.

    Args:
        client: connection to the shard's server.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, client: LanClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def ask(
        self, operation: Callable[[H, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Let the shard's server carry out one of `OPERATIONS`, which its method names."""
        row = _BY_METHOD[operation]
        (write, _), (_, read) = row.request, row.result
        asked, payload = write(row.name, *arguments)
        if change is not None:
            asked |= _CHANGE.write(change)
        answer: R = read(*self._client.request(asked, payload, timeout_s=self._timeout_s))
        return answer


def read_change(meta: Meta) -> Change | None:
    """The change that a request of the primary shard makes; None if it makes none."""
    return _CHANGE.read(meta) if "change" in meta else None
