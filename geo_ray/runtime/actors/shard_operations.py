"""What can be asked of a shard that lives elsewhere: the one list, for both ends of the connection.

A row says what an operation is called on the wire, who carries it out, and how its arguments and
its result travel. `RemoteShard` asks by it, `ShardServer` answers by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.errors import InvariantError
from geo_ray.runtime.actors.parts import ShardParts
from geo_ray.runtime.messages import fields
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    as_tensor,
    contributions_meta,
    read_contributions,
    read_reply,
    reply_meta,
)
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.server.shard import Contribution, Shard
from geo_ray.transport.wire.meta import Meta

Packed = tuple[Meta, memoryview | None]
"""A header and the payload beside it."""

As = TypeVarTuple("As")
H = TypeVar("H")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Request(Generic[*As]):
    """How arguments travel.

    Attributes:
        write: the operation's name and the arguments as a header and a payload.
        read: the arguments.
    """

    write: Callable[[str, *As], Packed]
    read: Callable[[Meta, memoryview | None], tuple[*As]]


@dataclass(frozen=True, slots=True)
class Result(Generic[R]):
    """How a result travels.

    Attributes:
        write: the result as a header and a payload.
        read: the result.
    """

    write: Callable[[R], Packed]
    read: Callable[[Meta, memoryview | None], R]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the list; `_operation` makes them, so that the types of a row are checked.

    Attributes:
        name: on the wire.
        run: a method of `Shard` or `ShardParts`, which carries it out.
        request: how its arguments travel.
        result: how its result travels.
    """

    name: str
    run: Callable[..., Any]
    request: Request[*tuple[Any, ...]]
    result: Result[Any]


def _operation(
    name: str, run: Callable[[H, *As], R], request: Request[*As], result: Result[R]
) -> Operation:
    return Operation(name, run, request, result)


def _step(_: str, contributions: Sequence[Contribution], measure: bool) -> Packed:
    return contributions_meta(contributions) | {"measure": measure}, None


def _read_step(meta: Meta, _: memoryview | None) -> tuple[Sequence[Contribution], bool]:
    measure = fields.flag(meta, "measure")
    return read_contributions(meta), measure


def _read_norm(meta: Meta, _: memoryview | None) -> float | None:
    return fields.optional_number(meta, "mean_sq")


def _said(out: Outgoing | Wait | None) -> Packed:
    if isinstance(out, Outgoing):
        meta: Meta = {"said": "outgoing", "wait": out.wait, "fragment": out.fragment}
        return meta, as_bytes(out.payload_P)
    return {"said": "wait" if isinstance(out, Wait) else "nothing"}, None


def _read_said(meta: Meta, payload: memoryview | None) -> Outgoing | Wait | None:
    said = fields.text(meta, "said")
    if said == "outgoing":
        payload_S = torch.clone(as_tensor(payload))
        return Outgoing(payload_S, fields.flag(meta, "wait"), fields.count(meta, "fragment"))
    if said not in {"wait", "nothing"}:
        raise InvariantError(f"a shard server answered {said!r}")
    return Wait() if said == "wait" else None


def _read_part(meta: Meta, _: memoryview | None) -> PartInfo:
    return PartInfo.model_validate(meta)


_NOTHING: Request[*tuple[()]] = Request(lambda name: ({"op": name}, None), lambda *_: ())
_STEP = Request(_step, _read_step)
_REPLY: Request[Reply] = Request(
    lambda name, reply: (reply_meta(reply) | {"op": name}, as_bytes(reply.payload_P)),
    lambda meta, payload: (read_reply(meta, payload),),
)
_CHECKPOINT: Request[int] = Request(
    lambda name, checkpoint: ({"op": name, "id": checkpoint}, None),
    lambda meta, _: (fields.count(meta, "id"),),
)
_DONE: Result[None] = Result(lambda _: ({}, None), lambda *_: None)
_NORM: Result[float | None] = Result(lambda mean_sq: ({"mean_sq": mean_sq}, None), _read_norm)
_OUTGOING = Result(_said, _read_said)
_PARAMS: Result[Tensor] = Result(
    lambda params_S: ({}, as_bytes(params_S.clone())), lambda _, payload: as_tensor(payload)
)
_PART: Result[PartInfo] = Result(lambda part: (dict(part.model_dump()), None), _read_part)

OPERATIONS: Final = (
    _operation("apply", Shard.apply, _STEP, _NORM),
    _operation("speak", Shard.outgoing, _NOTHING, _OUTGOING),
    _operation("finish", Shard.finish, _NOTHING, _OUTGOING),
    _operation("merge", Shard.merge, _REPLY, _DONE),
    _operation("dropped", Shard.dropped, _NOTHING, _DONE),
    _operation("snapshot", Shard.snapshot, _CHECKPOINT, _DONE),
    _operation("params", Shard.live_params, _NOTHING, _PARAMS),
    _operation("write_part", ShardParts.write, _CHECKPOINT, _PART),
)
"""What the primary shard may ask of the others. Workers push and pull slices beside it."""
