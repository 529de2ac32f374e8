"""Messages between the ranks of regions and the process that serves the run.

A rank describes itself (`Hello`) and is told the run's terms and its slices (`Welcome`). All other
messages have a kind, few fields and a payload; their format is in `geo_ray.training.wire_format`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.errors import FrameError, GeoRayError
from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import Codec
from geo_ray.data.tasks.model_buffers import FLOATS, INTEGERS, BufferEntry
from geo_ray.joining.layout import Layout, Ranges, Slice, shapes_in
from geo_ray.joining.rank import RankState
from geo_ray.strategies.config import AnyStrategy, CodecConfig
from geo_ray.strategies.state import AveragerState
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import Averager
from geo_ray.training.parameters import fragment_bounds
from geo_ray.training.payload_encoding import AveragerWire, WirePlan
from geo_ray.training.wire_format import as_tensor, refusal_meta
from geo_ray.transport.security.tls import RANK_MARK
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.sockets import Address

SERVER: Final = "geo-ray-server"
"""Name of the serving endpoint."""
ADDRESSEE: Final = "addressee"
"""Field of a holder's messages: attempt of the region that they are for."""
_RANK_DIGITS: Final = 9


def rank_name(region: str, rank: int) -> str:
    """Return the name of a rank's endpoint."""
    return f"{region}{RANK_MARK}{rank}"


def holder_name(holder: int) -> str:
    """Return the endpoint of a process that holds averagers; 0 is the server itself."""
    return rank_name(SERVER, holder) if holder else SERVER


def process_words(holder: int) -> str:
    """Return what a process that holds averagers is called in messages; 0 is the server itself."""
    return f"averager process {holder + 1}" if holder else "the server of the run"


def rank_of(peer: str) -> int:
    """Return the rank of an endpoint.

    Raises:
        FrameError: it is not the endpoint of a rank.
    """
    text = peer.partition(RANK_MARK)[2]
    if not text.isdecimal() or len(text) > _RANK_DIGITS:
        raise FrameError(f"'{peer}' is not the endpoint of a rank")
    return int(text)


def number_of(peer: str) -> int:
    """Return the rank of an endpoint; -1 for others."""
    try:
        return rank_of(peer)
    except FrameError:
        return -1


def region_of(peer: str) -> str:
    """Return the region of an endpoint."""
    return peer.partition(RANK_MARK)[0]


class JoinTerms(StrictModel):
    """What every rank of a run must know: a part of the served configuration."""

    name: str = Field(description="name of the run")
    regions: tuple[str, ...] = Field(min_length=1, description="regions that are expected")
    strategy: AnyStrategy
    codec: CodecConfig = CodecConfig()
    steps: int = Field(ge=1, description="steps of every region")
    rows: int | None = Field(
        None, ge=1, description="rows of all regions, for strategies that end by rows"
    )
    seed: int = 0
    goal: str = ""
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0: only the last one")
    holders: int = Field(1, ge=1, description="processes that hold the averagers")
    saves_at_end: bool = Field(
        False, description="whether ranks wait for a last checkpoint after the end of the run"
    )

    def server_plan(self, region: str, attempt: int) -> ServerPlan:
        """Return the plan of a region."""
        traits = self.strategy.traits
        return ServerPlan(
            region=region,
            num_workers=1,
            batch_size=1,
            steps=None if traits.region.ends_by_total_rows else self.steps,
            attempt=attempt,
            alone=len(self.regions) == 1,
            goal=self.goal,
            last_round_is_final=traits.exchange.last != "always" and self.wire_plan().owes,
            has_final_update=traits.exchange.last == "always",
            never_waits=False,  # depends on measured times, which differ between ranks
            round_steps=traits.round_steps,
        )

    def wire_plan(self, layout: Layout | None = None, ranges: Ranges = ()) -> WirePlan:
        """Return how the payloads of a slice are encoded.

        Args:
            layout: the model; None: only the kinds of codecs matter.
            ranges: ranges of the slice.
        """
        plan = WirePlan.of(self.strategy, self.codec, self.seed)
        if layout is None:
            return plan
        shapes = shapes_in(layout, ranges)
        return replace(
            plan,
            up=_shaped(plan.up, shapes),
            down=_shaped(plan.down, shapes),
            bounds=self.bounds_in(ranges, layout.size),
        )

    @property
    def in_pieces(self) -> bool:
        """Whether a rank sends a change, and merges its answer, piece by piece."""
        traits, plan = self.strategy.traits, self.wire_plan()
        return (
            traits.in_rounds and traits.region.in_pieces and plan.up is None and plan.down is None
        )

    def bounds_in(self, ranges: Ranges, size: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of the model's fragments in a vector that has some ranges of it.

        Args:
            ranges: ranges of the model.
            size: P.
        """
        found = []
        for start, stop in fragment_bounds(size, self.strategy.traits.exchange.fragments):
            before = sum(max(0, min(b, start) - a) for a, b in ranges)
            inside = sum(max(0, min(b, stop) - max(a, start)) for a, b in ranges)
            found.append((before, before + inside))
        return tuple(found)

    def averager(
        self, layout: Layout, part: Slice, members: Sequence[str] | None = None
    ) -> Averager:
        """Return the averager of a slice.

        Args:
            layout: the model.
            part: the slice.
            members: regions that take part; None: all.
        """
        traits = self.strategy.traits
        enough = self.rows if traits.region.ends_by_total_rows else None
        wire = AveragerWire(self.wire_plan(layout, part.ranges))
        names = self.regions if members is None else members
        state = AveragerState(tuple(sorted(names)), reuses_updates=True)
        return Averager(self.strategy, part.size, state, wire=wire, enough=enough, goal=self.goal)


def _shaped(codec: Codec | None, shapes: Sequence[tuple[int, ...]]) -> Codec | None:
    """Return the codec for vectors that consist of tensors of some shapes."""
    with_shapes = None if codec is None else codec.traits.with_shapes
    return codec if with_shapes is None else with_shapes(shapes)


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's description of itself.

    Attributes:
        region: its region.
        rank: its rank in the region.
        world_size: ranks of the region.
        attempt: incarnation of the region's training; grows with every one.
        layout: its model.
        share: the ranges that it exchanges.
        saved: checkpoints of the run that it can load; None: it saves none.
        buffers: its model buffers.
        same: SHA-256 of what must be equal in all ranks of all regions, by name.
    """

    region: str
    rank: int
    world_size: int
    attempt: int
    layout: Layout
    share: Ranges
    saved: tuple[int, ...] | None = None
    buffers: tuple[BufferEntry, ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> Message:
        """Return the message that contains it."""
        meta: Meta = {
            "region": self.region,
            "rank": self.rank,
            "world_size": self.world_size,
            "attempt": self.attempt,
        }
        body = {
            "layout": self.layout.to_json(),
            "share": self.share,
            "saved": self.saved,
            "buffers": [astuple(each) for each in self.buffers],
            "same": dict(self.same),
        }
        return Message("join", meta, json.dumps(body).encode(), "control", CONTROL)

    @classmethod
    def read(cls, message: Message) -> Hello:
        """Read the result of `message`.

        Raises:
            FrameError: a field is missing or invalid.
            ModelMismatchError: the model cannot be read.
        """
        meta = message.meta
        try:
            body = json.loads(bytes(message.payload))
            share = tuple((int(a), int(b)) for a, b in body["share"])
            layout = Layout.from_json(str(body["layout"]))
            buffers = tuple(_buffer_entry(*each) for each in body["buffers"])
            means = {each.name: each for each in buffers if each.rule == "mean"}
            if any(
                e.variance_of is not None and means[e.variance_of].shape != e.shape for e in buffers
            ):
                raise ValueError("variances of other values")
            same = {str(name): str(value) for name, value in body["same"].items()}
            saved = None if body["saved"] is None else tuple(int(each) for each in body["saved"])
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise FrameError(f"a rank's description cannot be read: {error!r}") from None
        return cls(
            fields.text(meta, "region"),
            fields.count(meta, "rank"),
            fields.count(meta, "world_size"),
            fields.count(meta, "attempt"),
            layout,
            share,
            saved,
            buffers,
            same,
        )


def _buffer_entry(
    name: object, shape: Sequence[int], dtype: object, rule: object, variance_of: object
) -> BufferEntry:
    """Return the description of a model buffer from what another process says.

    Raises:
        ValueError: it is none.
    """
    sizes = tuple(int(n) for n in shape)
    known = getattr(torch, str(dtype), None)
    types = (*FLOATS, *INTEGERS) if rule == "mean" else (known,)
    if any(n < 0 for n in sizes) or not isinstance(known, torch.dtype) or known not in types:
        raise ValueError(f"'{name}' is {dtype} {sizes}")
    means = None if variance_of is None else str(variance_of)
    which: Literal["mean", "region"] = "mean" if rule == "mean" else "region"
    return BufferEntry(str(name), sizes, str(dtype), which, means)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The run's answer to a rank, once all regions are there.

    Attributes:
        terms: the run's terms.
        slices: ranges of the slices that the rank exchanges, by number.
        is_source: whether the rank sends its initial parameters.
        copies: whether the rank begins with a copy of another region's state (`copy_message`).
        checkpoint: the checkpoint from which it begins; None: another way.
        is_donor: whether it sends a copy of its state at once, for regions that begin with it.
        view: generation of the view (`geo_ray.training.membership`) of a resumed run.
        holders: addresses of the processes that hold averagers, from `holder_name` 1 on.
    """

    terms: JoinTerms
    slices: Mapping[int, Ranges]
    is_source: bool = False
    copies: bool = False
    checkpoint: int | None = None
    is_donor: bool = False
    view: int = 0
    holders: tuple[Address, ...] = ()

    def message(self) -> Message:
        """Return the message that contains it."""
        body = {
            "terms": self.terms.model_dump_json(),
            "slices": [[index, ranges] for index, ranges in self.slices.items()],
            "is_source": self.is_source,
            "copies": self.copies,
            "checkpoint": self.checkpoint,
            "is_donor": self.is_donor,
            "view": self.view,
            "holders": self.holders,
        }
        return Message("welcome", {}, json.dumps(body).encode(), "control", CONTROL)

    @classmethod
    def read(cls, message: Message) -> Welcome:
        """Read the result of `message`."""
        body = json.loads(bytes(message.payload))
        slices = {
            int(index): tuple((int(a), int(b)) for a, b in ranges)
            for index, ranges in body["slices"]
        }
        return cls(
            JoinTerms.model_validate_json(body["terms"]),
            slices,
            bool(body["is_source"]),
            bool(body["copies"]),
            body["checkpoint"],
            bool(body["is_donor"]),
            int(body["view"]),
            tuple((str(host), int(port)) for host, port in body["holders"]),
        )


def copy_message(index: int | None, state: RankState) -> Message:
    """Return the message with a copy of the state of a slice; ``index``: None without a slice."""
    names = sorted(state.tensors)
    meta: Meta = {
        "names": [*names],
        "sizes": [state.tensors[name].numel() for name in names],
        "control": json.dumps(state.control),
    }
    meta["slice"] = index
    vectors = [state.tensors[name].reshape(-1) for name in names]
    payload = payload_of(torch.cat(vectors)) if vectors else b""
    return Message("copy", meta, payload, "transfer")


def read_copy(message: Message) -> tuple[int | None, RankState]:
    """Read the result of `copy_message`.

    Raises:
        FrameError: a field is missing or invalid.
    """
    meta = message.meta
    sizes, names = fields.counts(meta, "sizes"), fields.texts(meta, "names")
    if len(sizes) != len(names):
        raise FrameError(f"the state of a slice has {len(names)} names and {len(sizes)} sizes")
    whole = as_tensor(memoryview(message.payload), sum(sizes))
    parts = torch.split(whole, list(sizes)) if sizes else ()
    tensors = {name: part.clone() for name, part in zip(names, parts, strict=True)}
    try:
        control = json.loads(fields.text(meta, "control"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the state of a slice cannot be read: {error}") from None
    return fields.optional_count(meta, "slice"), RankState(tensors, control)


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message to a rank."""

    peer: str
    message: Message


def refusal_to(peer: str, error: GeoRayError, attempt: int) -> Outbound:
    """Return the message that a rank cannot continue.

    Args:
        peer: the rank.
        error: the reason.
        attempt: incarnation of the region's training; 0: any.
    """
    meta = {**refusal_meta(0, error), "attempt": attempt}
    return Outbound(peer, Message("refused", meta, b"", "control", CONTROL))


def payload_of(vector: Tensor) -> memoryview:
    """Return a fp32 vector as bytes."""
    return memoryview(vector.detach().contiguous().numpy().data).cast("B")
