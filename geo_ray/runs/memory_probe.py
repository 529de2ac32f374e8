"""Measures how much memory a strategy and its codecs hold for exchanges of joined regions.

`exchange_memory` runs their code for a small vector, in all regions and the averager, and counts
the tensors of each end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from geo_ray.base.errors import InvariantError
from geo_ray.joining.layout import Layout, Parameter, Ranges, Slice
from geo_ray.joining.protocol import JoinTerms
from geo_ray.joining.rank import JoinedModel, RankExchange, SliceWire
from geo_ray.planner.memory import ExchangeMemory
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import CodecConfig
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import RegionWire


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors while they live, by the owner that was set when they were made.

    Attributes:
        live: present bytes by owner.
        peak: largest number of them since `restart`.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._owner = ""
        self._known: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def of(self, owner: str) -> Iterator[None]:
        """Count new tensors as those of an owner."""
        before, self._owner = self._owner, owner
        try:
            with self:
                yield
        finally:
            self._owner = before

    def restart(self) -> None:
        """Forget peaks."""
        self.peak = dict(self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages of its results that are new."""
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in _tensors(result):
            if each.untyped_storage()._cdata not in given:
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        owner, size = self._owner, storage.nbytes()

        def freed(_: object) -> None:
            self._known.pop(key, None)
            self.live[owner] -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live[owner] = self.live.get(owner, 0) + size
        self.peak[owner] = max(self.peak.get(owner, 0), self.live[owner])


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors that have values."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and not each.is_meta]


_ROWS, _COLUMNS = 128, 128
_FP32_BYTES: Final = 4
_ROUNDS: Final = 3  # of the whole model
_SERVER: Final = "server"


class _Vector:
    """A rank's share of a module, without the module."""

    def __init__(self, size: int, *, keeps: bool) -> None:
        self.size = size
        self._keeps = keeps
        self._module_S = torch.zeros(size)
        self._params_S: Tensor | None = None

    def train(self) -> None:
        """Change the parameters as a step would do."""
        self._module_S.add_(torch.randn(self.size))

    def read(self) -> Tensor:
        """See `geo_ray.joining.rank.ShareVector`."""
        if self._params_S is None:
            self._params_S = torch.empty(self.size)
        return self._params_S.copy_(self._module_S)

    def write(self, params_S: Tensor) -> None:
        """See `geo_ray.joining.rank.ShareVector`."""
        self._module_S.copy_(params_S)

    def release(self) -> bool:
        """See `geo_ray.joining.rank.ShareVector`."""
        if not self._keeps:
            self._params_S = None
        return self._params_S is None

    def part(self, ranges: Ranges) -> Tensor:
        """See `geo_ray.joining.rank.ShareVector`."""
        return torch.cat([self._module_S[start:stop] for start, stop in ranges])


class _Probe:
    """Regions of one rank each, and the averager, with the tensors of each end counted."""

    def __init__(self, terms: JoinTerms, *, keeps_vector: bool) -> None:
        layout = Layout((Parameter("weight", (_ROWS, _COLUMNS), "float32"),))
        self._size, self._counted, names = layout.size, _Allocations(), terms.regions
        self._keeps_vector, self._in_pieces = keeps_vector, terms.in_pieces
        self._fragments = terms.strategy.traits.exchange.fragments
        self._most_steps = 4 * terms.steps
        ranges = ((0, layout.size),)
        with self._counted.of(_SERVER):
            self._averager = terms.averager(layout, Slice(ranges, dict.fromkeys(names, 0)))
        self._vectors = {name: _Vector(layout.size, keeps=keeps_vector) for name in names}
        self._ranks: dict[str, RankExchange] = {}
        for name in names:
            with self._counted.of(name):
                bounds = terms.bounds_in(ranges, layout.size)
                model = JoinedModel(
                    terms.strategy, self._vectors[name], bounds, in_pieces=terms.in_pieces
                )
                model.start()
                wire = RegionWire(terms.wire_plan(layout, ranges), name, layout.size)
                plan = terms.server_plan(name, 1)
                slices = [SliceWire(0, ranges, ranges, wire)]
                self._ranks[name] = RankExchange(plan, model, slices=slices)

    def run(self) -> ExchangeMemory:
        """Train to the end; return the bytes per parameter after the first exchange."""
        first = next(iter(self._ranks))
        rest: dict[str, list[int]] = {first: [], _SERVER: []}
        answered, number = dict.fromkeys(self._ranks, 0), 0
        while not all(rank.is_done for rank in self._ranks.values()):
            number += 1
            is_warm = min(answered.values()) >= self._fragments
            sent = self._step()
            if is_warm:
                rest[first].append(self._counted.live[first])
            while sent:
                replies = self._average(sent, float(number))
                sent.clear()
                if not is_warm:
                    self._counted.restart()
                for to in {reply.to for reply in replies}:
                    answered[to] += 1
                sent += self._merge(replies)
                if is_warm and not sent:
                    rest[_SERVER].append(self._counted.live[_SERVER])
            if number > self._most_steps:
                raise InvariantError("a strategy does not come to an end")
        peak = self._counted.peak
        # At the end a rank reads its parameters, and sends them from there.
        vectors = 0 if self._keeps_vector else 1
        at_end = self._counted.live[first] + vectors * _FP32_BYTES * self._size
        found = (min(rest[first]), peak[first], min(rest[_SERVER]), peak[_SERVER], at_end)
        return ExchangeMemory(*(count / self._size for count in found))

    def _step(self) -> list[UpdateMessage]:
        sent: list[UpdateMessage] = []
        for name, rank in self._ranks.items():
            self._vectors[name].train()
            if not rank.waits and not rank.is_done:
                with self._counted.of(name):
                    for each in rank.step(1, 1.0):
                        sent += self._encoded(rank, each.update)
                    rank.forget_sent()
        return sent

    def _encoded(self, rank: RankExchange, update: UpdateMessage) -> list[UpdateMessage]:
        """Return an update as it is sent; values that are sent in pieces are the server's."""
        found = []
        for each, part in zip(rank.slices, rank.encoded(update), strict=True):
            if part.payload_P.is_meta:
                with self._counted.of(_SERVER):
                    whole_P = torch.empty(part.payload_P.numel())
                for start, stop in _queued(whole_P.numel()):
                    whole_P[start:stop] = rank.values(each, part.payload_P, start, stop)
                part = replace(part, payload_P=whole_P)
            found.append(part)
        return found

    def _average(self, sent: Sequence[UpdateMessage], now_s: float) -> list[ReplyMessage]:
        replies: list[ReplyMessage] = []
        with self._counted.of(_SERVER):
            for each in sent:
                part = self._averager.checked(each if self._in_pieces else _received(each))
                self._averager.at(now_s)
                replies += self._averager.on_update(part)
            self._averager.forget_answers()
        return replies

    def _merge(self, replies: list[ReplyMessage]) -> list[UpdateMessage]:
        sent: list[UpdateMessage] = []
        while replies:
            reply = replies.pop()
            rank = self._ranks[reply.to]
            with self._counted.of(reply.to):
                if self._in_pieces:
                    for start, stop in _queued(self._size):
                        piece = reply.payload_P[start:stop].clone()
                        rank.merge_piece(rank.slices[0], start, piece)
                        del piece
                    reply = replace(reply, payload_P=reply.payload_P.to("meta"))
                decoded = rank.slices[0].wire.decode(reply if self._in_pieces else _received(reply))
                rank.on_replies([decoded], 1.0)
                for each in rank.advance():
                    sent += self._encoded(rank, each.update)
                rank.forget_sent()
        return sent


def _queued(size: int) -> Iterator[tuple[int, int]]:
    """Return quarters of a payload: an endpoint queues so much of it at a time."""
    step = -(-size // 4)
    return ((start, min(size, start + step)) for start in range(0, size, step))


_M = TypeVar("_M", UpdateMessage, ReplyMessage)


def _received(message: _M) -> _M:
    """Return a message with new vectors, as it comes from the network."""
    coded = message.coded
    if coded is not None:
        coded = replace(coded, data_B=coded.data_B.clone())
    return replace(message, payload_P=message.payload_P.clone(), coded=coded)


def exchange_memory(
    strategy: Strategy,
    codec: CodecConfig,
    regions: int,
    *,
    keeps_vector: bool = True,
) -> ExchangeMemory:
    """Return the bytes per exchanged parameter at both ends of exchanges.

    They are those of a vector of 16,384 parameters; memory that does not grow with the model counts
    too, and sparse codecs send random positions.

    Args:
        strategy: a strategy that joined regions support.
        codec: the codecs.
        regions: number of regions.
        keeps_vector: whether a rank keeps its parameters in host memory between exchanges: on
            accelerators (pinned memory), and with parameters that are not float32.
    """
    names = tuple(f"region-{number}" for number in range(max(1, regions)))
    traits = strategy.traits
    rounds = _ROUNDS * traits.exchange.fragments
    steps = math.ceil((rounds + 0.5) * traits.exchange.every)
    terms = JoinTerms(
        name="probe",
        regions=names,
        strategy=strategy,
        codec=codec,
        steps=steps,
        rows=steps * len(names) if traits.region.ends_by_total_rows else None,
    )
    return _Probe(terms, keeps_vector=keeps_vector).run()
