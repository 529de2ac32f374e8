"""The served side of a run whose regions join from their own training loops.

A pure state machine: calls are messages of ranks, and return messages for ranks. `JoinService`

1. waits until every rank of every expected region has described its model and its share of it;
2. cuts the model into slices (`geo_ray.joining.layout`), with one averager each;
3. distributes the initial parameters, those of the first region by name;
4. takes in a region's update once all its ranks have sent all its slices, so that a round commits
   in all slices or in none, and sends each answer to the rank that owns the slice;
5. collects the final parameters.

Steps and rows of a region are those of all its ranks. Ranks that disagree end the region.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from typing import Any, Final, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointMismatchError,
    CheckpointMissingError,
    FrameError,
    GeoRayError,
    InvariantError,
    JoinRefusedError,
    ModelMismatchError,
    NonFiniteError,
    RanksDisagreeError,
    RegionLostError,
)
from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import Codec
from geo_ray.codecs.feedback import all_finite
from geo_ray.data.tasks.model_buffers import FLOATS, INTEGERS, BufferEntry
from geo_ray.joining.layout import (
    Layout,
    Ranges,
    Slice,
    common,
    gathered,
    put,
    shapes_in,
    slices_of,
)
from geo_ray.joining.rank import RankState
from geo_ray.joining.save_round import SaveRound, SaveStage
from geo_ray.strategies.config import AnyStrategy, CodecConfig
from geo_ray.strategies.state import AveragerState
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import AVERAGER_WIRE, OPEN, Averager
from geo_ray.training.checkpoint_parts import AveragerSnapshot
from geo_ray.training.membership import MemberChange
from geo_ray.training.messages import ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.model_buffers import AVERAGER_PREFIX, REGION_PREFIX, AveragerBuffers
from geo_ray.training.parameters import BufferLayout, digest, fragment_bounds
from geo_ray.training.payload_encoding import AveragerWire, WirePlan
from geo_ray.training.wire_format import (
    as_tensor,
    payload_bytes,
    read_stats,
    read_update,
    refusal_meta,
    reply_meta,
)
from geo_ray.transport.security.tls import RANK_MARK
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message

_LOGGER: Final = logging.getLogger(__name__)
SERVER: Final = "geo-ray-server"
"""Name of the serving endpoint."""

_BUFFERS: Final = -1  # stands for the model buffers among the numbers of slices
_RANK_DIGITS: Final = 9
_OF_FRAGMENT: Final = re.compile(r"outer(\d+)/")  # state of the outer optimizer of a fragment
_RANK_FIELDS: Final = ("rank_rows", "rank_loss", "slice")  # of an update's header


def rank_name(region: str, rank: int) -> str:
    """Return the name of a rank's endpoint."""
    return f"{region}{RANK_MARK}{rank}"


def rank_of(peer: str) -> int:
    """Return the rank of an endpoint.

    Raises:
        FrameError: it is not the endpoint of a rank.
    """
    text = peer.partition(RANK_MARK)[2]
    if not text.isdecimal() or len(text) > _RANK_DIGITS:
        raise FrameError(f"'{peer}' is not the endpoint of a rank")
    return int(text)


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
        state = AveragerState(tuple(sorted(self.regions if members is None else members)))
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
    """

    region: str
    rank: int
    world_size: int
    attempt: int
    layout: Layout
    share: Ranges
    saved: tuple[int, ...] | None = None
    buffers: tuple[BufferEntry, ...] = ()

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
            saved = None if body["saved"] is None else tuple(int(each) for each in body["saved"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
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
    """

    terms: JoinTerms
    slices: Mapping[int, Ranges]
    is_source: bool = False
    copies: bool = False
    checkpoint: int | None = None
    is_donor: bool = False
    view: int = 0

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
class SavedSlice:
    """The averager's state of one slice in a checkpoint.

    Attributes:
        ranges: ranges of the slice.
        tensors: tensors by name.
        control: plain values.
    """

    ranges: Ranges
    tensors: Mapping[str, Tensor]
    control: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The server's part of a checkpoint.

    Attributes:
        id: of the checkpoint.
        layout: the model.
        slices: state of the averagers.
        steps: steps of each region.
    """

    id: int
    layout: Layout
    slices: tuple[SavedSlice, ...]
    steps: Mapping[str, int]


class Stage(Enum):
    """Progress of a run."""

    GATHERING = "gathering"
    """Not all ranks of all regions are there."""
    STARTING = "starting"
    """The initial parameters are on their way."""
    TRAINING = "training"
    """Regions exchange updates."""
    ENDING = "ending"
    """All regions have finished; the final parameters are on their way."""
    DONE = "done"
    """The final parameters are here."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message to a rank."""

    peer: str
    message: Message


@dataclass(slots=True)
class _Region:
    """The ranks of a region, and the parts of its open update."""

    attempt: int
    world_size: int
    hellos: dict[int, Hello] = field(default_factory=dict)
    parts: dict[int, UpdateMessage] = field(default_factory=dict)  # by slice
    since_s: float = 0.0  # when the first of them arrived
    losses: dict[int, float] = field(default_factory=dict)  # of ranks that report one
    steps: int = 0  # in all updates that were taken in
    stepped_s: float = 0.0  # time of the newest of them
    open: UpdateMessage | None = None  # the update that is not answered yet, of the first slice
    sent_bytes: int = 0  # payload of that update in all slices
    headers: dict[int, tuple[UpdateMessage, int]] = field(default_factory=dict)  # by rank
    buffers: dict[int, Tensor] = field(default_factory=dict)  # uint8 (E,), by rank
    finished: set[str] = field(default_factory=set)  # ranks that have ended

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have described themselves."""
        return len(self.hellos) == self.world_size

    @property
    def saves(self) -> bool:
        """Whether all ranks write parts of checkpoints."""
        return all(hello.saved is not None for hello in self.hellos.values())

    def has(self, checkpoint: int) -> bool:
        """Return whether all ranks can load a checkpoint."""
        return all(checkpoint in (hello.saved or ()) for hello in self.hellos.values())


class JoinService:
    """See the module.

    Attributes:
        terms: the run.
        stage: its progress.
        layout: its model; None until the first rank has described it.
        slices: slices of the model.
        averagers: one per slice.
        model_P: the final parameters, fp32 (P,), in stage `DONE`; the initial ones before.
        buffer_layout: its model buffers; they do not depend on slices.
        buffers_B: the final model buffers, uint8 (B,), or the initial ones, as `model_P`.
        failure: the error that ends the run; None: there is none.
        save: the checkpoint that is being made; None: there is none.

    Args:
        terms: the run.
        now_s: returns the time of the run's clock.
        resumed: the checkpoint from which the run continues; None: it begins.
        least: with fewer regions, the others wait for one that was lost to join again.
    """

    def __init__(
        self,
        terms: JoinTerms,
        now_s: Callable[[], float],
        resumed: SavedRun | None = None,
        least: int = 1,
    ) -> None:
        self.terms = terms
        self._least = least
        self._held: dict[str, tuple[float, str]] = {}  # lost regions that the others wait for
        self.stage = Stage.GATHERING
        self.layout: Layout | None = None
        self.slices: tuple[Slice, ...] = ()
        self.averagers: list[Averager] = []
        self.model_P = torch.empty(0)
        self.buffer_layout = BufferLayout(())
        self.buffers_B = no_buffers()
        self.failure: GeoRayError | None = None
        self.save: SaveRound | None = None
        self._resumed = resumed
        self._newest_save = -1  # id of the newest checkpoint that was begun
        self._snapshots: list[AveragerSnapshot] = []  # the averagers' state for `save`
        self._saved_slices: tuple[Slice, ...] = ()  # at its barrier
        self._saved_steps: dict[str, int] = {}  # steps of regions there
        self._saved_buffers: tuple[dict[str, Tensor], dict[str, float]] = {}, {}
        self._now_s = now_s
        self._buffers = AveragerBuffers()
        self._regions: dict[str, _Region] = {}
        self._missing: set[int] = set()  # slices whose parameters are on their way, or `_BUFFERS`
        self._joining: dict[str, _Region] = {}  # regions that wait for the next barrier
        self._donor = ""  # whose state regions copy
        self._copiers: tuple[str, ...] = ()  # which do
        self._copied: dict[int, int] = {}  # bytes of each slice of that state that has arrived
        self._barrier_s = 0.0  # time of the barrier at which it joined
        self._events: list[dict[str, Any]] = []
        # sums of each rank by region, at each (step, is the last one), until all are there
        self._evaluations: dict[
            tuple[int, bool], dict[str, dict[int, tuple[int, dict[str, list[float]]]]]
        ] = {}

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def version(self) -> int:
        """Commits so far."""
        return self.averagers[0].state.version if self.averagers else 0

    @property
    def digest(self) -> str:
        """SHA-256 of the final parameters."""
        return digest(self.model_P)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The regions that wait for the next barrier to join the run again."""
        return tuple(name for name, region in self._joining.items() if region.is_complete)

    def missing(self) -> dict[str, str]:
        """Return what is missing for the start, by region."""
        found = {}
        for name in self.terms.regions:
            region = self._regions.get(name)
            if region is None:
                found[name] = "not there"
            elif not region.is_complete:
                found[name] = f"{len(region.hellos)} of {region.world_size} ranks"
        return found

    # ------------------------------------------------------------------ messages of ranks

    def on_message(self, peer: str, message: Message) -> list[Outbound]:
        """Handle a message of a rank.

        Args:
            peer: name of its endpoint, which the transport has verified.
            message: the message.

        Returns:
            Messages to ranks. If a message is refused, its region gets the error, and the others
            continue without the region.
        """
        try:
            if message.kind == "join":
                return self._on_join(peer, Hello.read(message))
            self._check_peer(peer)
            if message.kind == "state":
                return self._on_state(peer, message)
            if message.kind == "buffers":
                return self._on_buffers(peer, message)
            if message.kind == "update":
                return self._on_update(peer, message)
            if message.kind == "copy":
                return self._on_copy(peer, message)
            if message.kind == "evaluation":
                self._on_evaluation(peer, message)
                return []
            if message.kind == "finished":
                return self._on_finished(peer)
            if message.kind in ("part", "saved", "unsaved"):
                return self._on_save(peer, message)
            if message.kind == "failed":
                return self._on_failed(peer, message.meta)
            raise FrameError(f"unknown message '{message.kind}'")
        except GeoRayError as error:
            return self._refused(peer, message, error)

    def _refused(self, peer: str, message: Message, error: GeoRayError) -> list[Outbound]:
        """Handle a message that is refused: its sender may ignore that, so its region is lost."""
        name, attempt = region_of(peer), message.meta.get("attempt")
        region = self._joining.get(name) or self._regions.get(name)
        if region is None or attempt not in (None, region.attempt):  # of another process group
            return [_refusal(peer, error, attempt if isinstance(attempt, int) else 0)]
        found = self._refuse(name, error, [peer])
        ends = self.stage is not Stage.GATHERING and not isinstance(error, JoinRefusedError)
        if ends and 0 <= _number(peer) < region.world_size:
            found += self.on_lost(name, error.message)
        return found

    def _check_peer(self, peer: str) -> None:
        """Refuse ranks that the region does not have.

        Raises:
            FrameError: there is no such rank.
        """
        region, rank = self._regions.get(region_of(peer)), rank_of(peer)
        if region is not None and rank >= region.world_size:
            raise FrameError(f"'{peer}' is not one of the region's {region.world_size} ranks")

    def on_wake(self) -> list[Outbound]:
        """Let the averagers answer when the time has come that the strategy asked for."""
        wakes_s = self.averagers[0].wakes_s if self.averagers else None
        now_s = self._now_s()
        if wakes_s is None or now_s < wakes_s:
            return []
        replies = []
        for averager in self.averagers:
            averager.at(now_s)
            replies.append(averager.on_wake())
        return self._answers(replies)

    def on_lost(self, region: str, cause: str) -> list[Outbound]:
        """Continue without a region."""
        if self.stage is Stage.DONE:
            return []
        self._stop_joining(region)
        was_source = bool(self._regions) and region == self._source
        if self._regions.pop(region, None) is None or self.stage is Stage.GATHERING:
            return []
        self._emit("region_lost", region=region, cause=cause)
        self._buffers.leave(region)
        for found_at in self._evaluations.values():
            found_at.pop(region, None)
        if not self._regions:
            self.failure = RegionLostError(f"all regions are lost; the last one: {cause}")
            return []
        if self.stage is Stage.ENDING:  # another region has the same parameters
            if not was_source:
                return []
            self._missing = self._everything()
            return self._all("collect", [self._source])
        if self.stage is Stage.STARTING and was_source:
            self.failure = RegionLostError(
                f"region '{region}' was lost before it had sent the initial parameters: {cause}"
            )
            return []
        self._complete_evaluations()
        found = self._leave_out(region, cause)
        if len(self._regions) < self._least and not self.averagers[0].stopping:
            _LOGGER.warning("the run waits for region '%s'", region)
            self._held[region] = self._now_s(), cause
        else:
            found += self._answers([averager.leave(region) for averager in self.averagers])
        if region == self._donor and not all(self._copied.values()):
            for name in [name for name in self._copiers if name != region]:
                error = RegionLostError(
                    f"region '{region}' was lost while region '{name}' copied its state",
                    fix="Start the region again.",
                )
                found += self._refuse(name, error) + self.on_lost(name, error.message)
        return found + (self._ended() if self.stage is Stage.TRAINING else [])

    def _stop_joining(self, region: str) -> None:
        """Forget that a region waits for the next barrier."""
        if self._joining.pop(region, None) is not None:
            for averager in self.averagers:  # it is no member yet, so that nothing is answered
                averager.leave(region)

    def lose(self, region: str, cause: str) -> list[Outbound]:
        """Continue without a region, and tell its ranks, which may be connected again."""
        error = RegionLostError(f"the run continues without region '{region}': {cause}")
        return self._refuse(region, error) + self.on_lost(region, cause)

    def check_held(self, longest_s: float) -> list[Outbound]:
        """End the run if it has waited too long for enough regions.

        Args:
            longest_s: longest wait.
        """
        if not self._held or self.failure is not None:
            return []
        since_s = min(at_s for at_s, _ in self._held.values())
        if self._now_s() - since_s < longest_s:
            return []
        causes = "; ".join(f"region '{n}': {cause}" for n, (_, cause) in self._held.items())
        self.failure = RegionLostError(
            f"fewer than members.min = {self._least} regions for {longest_s:g} s: {causes}"
        )
        return [each for name in self._regions for each in self._refuse(name, self.failure)]

    @property
    def awaited(self) -> dict[str, str]:
        """The lost regions that the others wait for, with the causes."""
        return {name: cause for name, (_, cause) in self._held.items()}

    def release(self) -> list[Outbound]:
        """Continue without the lost regions that the others have waited for."""
        found: list[Outbound] = []
        for name in list(self._held):
            del self._held[name]
            found += self._answers([averager.leave(name) for averager in self.averagers])
        return found

    def is_awaited(self, peer: str) -> bool:
        """Return whether an endpoint is a rank of a region that takes part, or will."""
        name = region_of(peer)
        region = self._joining.get(name) or self._regions.get(name)
        return region is not None and 0 <= _number(peer) < region.world_size

    def check_late(self, longest_s: float) -> list[Outbound]:
        """Continue without regions whose ranks do not all send an update that others have sent.

        Args:
            longest_s: largest time between the first and the last rank of a region.
        """
        found: list[Outbound] = []
        for name, region in list(self._regions.items()):
            missing = sorted(set(range(region.world_size)) - region.headers.keys())
            if not region.headers or self._now_s() - region.since_s < longest_s:
                continue
            sent, (update, _) = next(iter(region.headers.items()))
            error = RanksDisagreeError(
                f"region '{name}': rank {sent} sent update {update.seq} {longest_s:g} s ago; ranks "
                f"{missing} have not"
            )
            found += self._refuse(name, error) + self.on_lost(name, error.message)
        return found

    def request_stop(self) -> list[Outbound]:
        """Ask every region to finish with its next answer."""
        for averager in self.averagers:
            averager.request_stop()
        return self.release()

    # ------------------------------------------------------------------ checkpoints

    def begin_save(self, checkpoint: int, keep: Sequence[int], timeout_s: float) -> list[Outbound]:
        """Begin a checkpoint, if that is possible now; see `save`.

        A region may have committed files of a checkpoint that the run has not: its id is not used
        again.

        Args:
            checkpoint: lowest id.
            keep: committed checkpoints that stay.
            timeout_s: time for the parts of ranks, from the barrier on.
        """
        may_begin = (
            self.stage is Stage.TRAINING
            and self.failure is None
            and self.save is None
            and self.can_save
            and not any(each.is_changing or each.stopping for each in self.averagers)
        )
        if not may_begin:
            return []
        known = [hello.saved or () for e in self._regions.values() for hello in e.hellos.values()]
        used = max((each for saved in known for each in saved), default=-1)
        self._newest_save = max(checkpoint, used + 1, self._newest_save + 1)
        self.save = SaveRound(self._newest_save, tuple(keep), timeout_s)
        return self._answers([averager.change(MemberChange()) for averager in self.averagers])

    @property
    def can_save(self) -> bool:
        """Whether the ranks of a region write parts of checkpoints."""
        return any(region.saves for region in self._regions.values())

    def end_save(self) -> None:
        """Forget the checkpoint that was being made."""
        self.save, self._snapshots = None, []

    @property
    def saved_run(self) -> SavedRun:
        """The server's part of `save`, which is past its barrier.

        Raises:
            InvariantError: there is none.
        """
        save, layout = self.save, self.layout
        if save is None or layout is None or not self._snapshots:
            raise InvariantError("no checkpoint is being made")
        found = []
        for each, snapshot in zip(self._saved_slices, self._snapshots, strict=True):
            tensors = {
                name: copy.whole()
                for name, copy in snapshot.copies.items()
                if not name.startswith(OPEN)  # all regions have their answers
            }
            found.append(SavedSlice(each.ranges, tensors, {**snapshot.control, "exchanges": {}}))
        buffers, rows = self._saved_buffers
        first = found[0]
        found[0] = SavedSlice(
            first.ranges, {**first.tensors, **buffers}, {**first.control, "buffer_rows": rows}
        )
        return SavedRun(save.id, layout, tuple(found), self._saved_steps)

    @property
    def steps(self) -> dict[str, int]:
        """Steps of each region in all updates that were taken in."""
        return {name: region.steps for name, region in self._regions.items()}

    def check_save(self) -> list[Outbound]:
        """Leave out regions that are late with their parts of a checkpoint."""
        save = self.save
        if save is None:
            return []
        if save.stage is SaveStage.MEETING and not self.averagers[0].is_changing:
            self.end_save()  # the run was asked to finish before the barrier
            return []
        orders = save.check_deadline(self._now_s())
        return [Outbound(rank_name(name, 0), order) for name, order in orders]

    def _on_save(self, peer: str, message: Message) -> list[Outbound]:
        if self.save is None:
            return []
        name = region_of(peer)
        order = self.save.on_message(name, rank_of(peer), message)
        return [] if order is None else [Outbound(rank_name(name, 0), order)]

    def _leave_out(self, region: str, cause: str) -> list[Outbound]:
        """Continue a checkpoint without a lost region."""
        order = None if self.save is None else self.save.leave_out(region, cause)
        return [] if order is None else [Outbound(rank_name(region, 0), order)]

    def _met(self) -> Meta:
        """Copy the averagers' state at the barrier of a checkpoint; return a field for ranks."""
        save = self.save
        if save is None or save.stage is not SaveStage.MEETING:
            return {}
        save.deadline_s += self._now_s()
        save.met(
            {n: (each.attempt, each.world_size) for n, each in self._regions.items() if each.saves}
        )
        self._saved_steps, self._saved_slices = self.steps, self.slices
        self._saved_buffers = self._buffers.export()
        for averager in self.averagers:
            averager.begin_checkpoint(save.id, halt=False)
            self._snapshots.append(averager.snapshots.pop())
        return {"save": save.id}

    # ------------------------------------------------------------------ start

    def _on_join(self, peer: str, hello: Hello) -> list[Outbound]:
        name, terms = hello.region, self.terms
        if self.failure is not None and self.stage is Stage.GATHERING:
            raise JoinRefusedError(f"run '{terms.name}' has failed: {self.failure.message}")
        if peer != rank_name(name, hello.rank):
            raise FrameError(f"'{peer}' describes itself as rank {hello.rank} of '{name}'")
        if name not in terms.regions:
            raise JoinRefusedError(
                f"run '{terms.name}' has no region '{name}'; it has {', '.join(terms.regions)}"
            )
        known = self._regions.get(name)
        if known is not None and hello.attempt < known.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        if self.stage is Stage.TRAINING:
            return self._on_rejoin(name, hello)
        if self.stage is not Stage.GATHERING:
            raise JoinRefusedError(
                f"run '{terms.name}' is {self.stage.value}: region '{name}' cannot join now"
            )
        if known is None or hello.attempt > known.attempt:
            known = self._regions[name] = _Region(hello.attempt, hello.world_size)
        _check_rank(name, hello, known)
        if not any(each.hellos for each in self._regions.values()):
            self.layout, self.buffer_layout = hello.layout, BufferLayout(hello.buffers)
            self._buffers = AveragerBuffers(self.buffer_layout)
        elif self.layout is not None:
            first = next(each for each, region in self._regions.items() if region.hellos)
            self._check_model(hello, self.layout, f"region '{first}'")
        known.hellos[hello.rank] = hello
        if self.missing() or self.layout is None:
            return []
        return self._start(self.layout)

    def _check_model(self, hello: Hello, layout: Layout, whose: str) -> None:
        """Refuse another model.

        Raises:
            ModelMismatchError: names what differs.
        """
        who = f"region '{hello.region}' (rank {hello.rank})"
        layout.check_same(hello.layout, who, whose)
        mine, theirs = self.buffer_layout.entries, hello.buffers
        if mine != theirs:
            names = sorted({each.name for each in set(mine) ^ set(theirs)})
            what = f"'{names[0]}' first" if names else "their order"
            raise ModelMismatchError(
                f"the model buffers of {who} are not those of {whose}: {what} differs",
                fix="Use the same modules and the same `buffers` of `site.training` everywhere.",
            )

    def _on_rejoin(self, name: str, hello: Hello) -> list[Outbound]:
        """Handle a rank of a region that was lost, or that restarted before anybody noticed."""
        found: list[Outbound] = []
        before = self._regions.get(name)
        if before is not None:
            if hello.attempt == before.attempt:
                raise JoinRefusedError(f"region '{name}' trains already")
            found += self.on_lost(name, "its process group was replaced")
            if self.failure is not None:
                raise JoinRefusedError(
                    f"region '{name}' was the only one; its state is lost with its processes"
                )
        region = self._joining.get(name)
        if region is not None and hello.attempt < region.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        try:
            return found + self._on_return(name, hello)
        except GeoRayError as error:  # the others get their answers all the same
            found += self._refuse(name, error, [rank_name(name, hello.rank)])
            self._stop_joining(name)
            return found

    def _on_return(self, name: str, hello: Hello) -> list[Outbound]:
        """Handle a rank of a region that is no member.

        Raises:
            GeoRayError: the region cannot join.
        """
        layout, region = self.layout, self._joining.get(name)
        if layout is None:
            raise InvariantError("a run trains without a model")
        self._check_model(hello, layout, "the run")
        if region is None or hello.attempt > region.attempt:
            self._stop_joining(name)
            region = self._joining[name] = _Region(hello.attempt, hello.world_size)
        _check_rank(name, hello, region)
        region.hellos[hello.rank] = hello
        if not region.is_complete:
            return []
        shares = [region.hellos[rank].share for rank in range(region.world_size)]
        slices_of(layout, {name: shares})  # refuses ranks that do not cover the model
        if not self._has_cuts(name, region):
            found = []  # the slices are cut again at the barrier, and the ranks learn them there
        else:
            found = self._welcomed(name, Welcome(self.terms, {}, copies=True))
        if len(self._regions) + len(self.waiting) >= self._least:
            found += self.release()
        return found + self._admit_next()

    def _has_cuts(self, name: str, region: _Region) -> bool:
        """Return whether each rank of a region has whole slices."""
        for rank in range(region.world_size):
            own = sorted(
                pair for each in self.slices if each.owners[name] == rank for pair in each.ranges
            )
            if _merged(own) != _merged(region.hellos[rank].share):
                return False
        return all(each.owners[name] < region.world_size for each in self.slices)

    def _cut_again(self) -> list[Outbound]:
        """Divide the model again, for a region that has joined with other ranks or shards.

        This happens at its barrier, after the answers: no update is under way. References and
        coding errors are kept for slices that stay the same, and dropped for others at both ends.
        """
        layout, joined = self.layout, [n for n in self._copiers if n in self._regions]
        if layout is None or all(self._has_cuts(n, self._regions[n]) for n in joined):
            return []
        before = []
        for each, averager in zip(self.slices, self.averagers, strict=True):
            tensors, control = averager.export()
            kept = {k: v for k, v in tensors.items() if not k.startswith(OPEN)}
            before.append(SavedSlice(each.ranges, kept, {**control, "exchanges": {}}))
        view = self.averagers[0].view
        shares = {
            name: [region.hellos[rank].share for rank in range(region.world_size)]
            for name, region in self._regions.items()
        }
        self.slices, self.averagers = slices_of(layout, shares), []
        for each in self.slices:
            averager = self.terms.averager(layout, each, view.members)
            averager.restore(*_cut(before, each, averager))
            averager.view = view
            averager.at(self._now_s())
            self.averagers.append(averager)
        self._copied = dict.fromkeys(range(len(self.slices)), 0)
        found = []
        for name, region in self._regions.items():
            if name in joined:
                found += self._welcomed(name, Welcome(self.terms, {}, copies=True))
                continue
            for rank in range(region.world_size):
                own = [[i, e.ranges] for i, e in enumerate(self.slices) if e.owners[name] == rank]
                # In the class of answers, which it must not overtake.
                message = Message("slices", {}, json.dumps(own).encode(), "reply")
                found.append(Outbound(rank_name(name, rank), message))
        return found

    def _admit_next(self) -> list[Outbound]:
        """Let the next waiting region join at the next barrier, if none is joining now."""
        ready = [name for name, region in self._joining.items() if region.is_complete]
        ready = [name for name in ready if name not in self._held]
        if not ready or any(averager.is_changing for averager in self.averagers):
            return []
        if any(averager.stopping for averager in self.averagers):
            return []
        change = MemberChange(joins=(min(ready),))
        return self._answers([averager.change(change) for averager in self.averagers])

    def _at_barrier(self, replies: Sequence[ReplyMessage]) -> None:
        """Make the joining regions members."""
        view = self.averagers[0].view
        for name in view.joining:
            if name in self._joining:
                self._regions[name] = self._joining.pop(name)
                self._copiers = view.joining
                self._copied = dict.fromkeys(range(len(self.slices)), 0)
                self._barrier_s = self._now_s()
        donors = [r.to for r in replies if r.barrier is not None and r.barrier.is_donor]
        self._donor = donors[0] if donors else self._donor
        for name in view.joining:
            self._buffers.join(name, self._donor)

    def _on_copy(self, peer: str, message: Message) -> list[Outbound]:
        """Pass a donor's state on to the ranks that begin with it."""
        if region_of(peer) != self._donor:
            raise FrameError(f"'{peer}' sent its state, which nobody awaits")
        index, state = read_copy(message)
        if index is None or index not in self._copied:
            return []
        self._copied[index] = len(message.payload)
        found = []
        for name in self._copiers:
            if name not in self._regions:
                continue
            owners = {each.owners[name] for each in self.slices}
            owner = rank_name(name, self.slices[index].owners[name])
            found.append(Outbound(owner, message))
            if index == 0:  # ranks without a slice need the plain values
                tensors = {k: v for k, v in state.tensors.items() if k.startswith(REGION_PREFIX)}
                empty = copy_message(None, RankState(tensors, state.control))
                idle = set(range(self._regions[name].world_size)) - owners
                found += [Outbound(rank_name(name, rank), empty) for rank in idle]
            if all(self._copied.values()):
                self._regions[name].steps = int(str(state.control["version"]))
                self._emit(
                    "region_joined",
                    region=name,
                    view=self.averagers[0].view.generation,
                    round=self.version,
                    step=self._regions[name].steps,
                    bytes=sum(self._copied.values()),
                    took_s=self._now_s() - self._barrier_s,
                )
        return found

    def _start(self, layout: Layout) -> list[Outbound]:
        shares = {
            name: [region.hellos[rank].share for rank in range(region.world_size)]
            for name, region in self._regions.items()
        }
        self.slices = slices_of(layout, shares)
        self.model_P = torch.empty(layout.size)
        if self._resumed is not None:
            try:
                return self._resume(layout, self._resumed)
            except GeoRayError as error:  # no region could continue
                self.failure, self.averagers = error, []
                return [each for name in self._regions for each in self._refuse(name, error)]
        self.averagers = [self.terms.averager(layout, each) for each in self.slices]
        self.stage, self._missing = Stage.STARTING, self._everything()
        welcome = Welcome(self.terms, {})
        return [
            each
            for name in self._regions
            for each in self._welcomed(name, replace(welcome, is_source=name == self._source))
        ]

    def _welcomed(self, name: str, welcome: Welcome) -> list[Outbound]:
        """Return an answer for all ranks of a region, each with its slices."""
        found = []
        for rank in range((self._joining.get(name) or self._regions[name]).world_size):
            own = {i: e.ranges for i, e in enumerate(self.slices) if e.owners[name] == rank}
            message = replace(welcome, slices=own).message()
            found.append(Outbound(rank_name(name, rank), message))
        return found

    def _has(self, name: str, checkpoint: int) -> bool:
        region = self._regions.get(name)
        return region is not None and region.has(checkpoint)

    def _resume(self, layout: Layout, saved: SavedRun) -> list[Outbound]:
        """Continue from a checkpoint, at its barrier."""
        layout.check_same(saved.layout, f"checkpoint {saved.id}", "the regions")
        members = [str(name) for name in cast(list[object], saved.slices[0].control["members"])]
        loading = [name for name in sorted(members) if self._has(name, saved.id)]
        if not loading:
            raise CheckpointMissingError(
                f"no region has its files of checkpoint {saved.id}",
                fix="Pass the folder of the run's checkpoints to `site.training`, or resume from "
                "another checkpoint.",
            )
        donor, copying = loading[0], sorted(self._regions.keys() - set(loading))
        for each in self.slices:
            averager = self.terms.averager(layout, each, members)
            tensors, control = _cut(saved.slices, each, averager)
            averager.restore(tensors, control)
            for gone in sorted(set(members) - set(loading)):
                averager.leave(gone)
            if copying:
                averager.admit(MemberChange(joins=tuple(copying), preferred_donor=donor))
            self.averagers.append(averager)
        first = saved.slices[0]
        of_buffers = {k: v for k, v in first.tensors.items() if k.startswith(AVERAGER_PREFIX)}
        self._buffers.restore(of_buffers, first.control.get("buffer_rows"))
        for gone in sorted(set(members) - set(loading)):
            self._buffers.leave(gone)
        for name in copying:
            self._buffers.join(name, donor)
        self.stage = Stage.TRAINING
        steps = saved.steps.get(donor, 0)
        for name, region in self._regions.items():
            region.steps = saved.steps.get(name, steps) if name in loading else steps
        self._donor, self._copiers = donor, tuple(copying)
        self._copied = dict.fromkeys(range(len(self.slices)), 0) if copying else {}
        welcome = Welcome(self.terms, {}, view=self.averagers[0].view.wire_generation)
        return [
            each
            for name in self._regions
            for each in self._welcomed(
                name,
                replace(
                    welcome,
                    copies=name in copying,
                    checkpoint=saved.id if name in loading else None,
                    is_donor=name == donor and bool(copying),
                ),
            )
        ]

    def _on_state(self, peer: str, message: Message) -> list[Outbound]:
        index = fields.count(message.meta, "slice")
        source = self._source
        if index not in self._missing:
            return []
        each = self.slices[index]
        if peer != rank_name(source, each.owners[source]):
            raise FrameError(f"'{peer}' sent parameters that it was not asked for")
        params_Q = as_tensor(memoryview(message.payload), each.size)
        if not all_finite(params_Q):
            raise NonFiniteError(f"the parameters of '{peer}' are not finite")
        put(self.model_P, each.ranges, params_Q)
        if self.stage is Stage.ENDING:
            return self._arrived(index)
        self._arrived(index)
        return [
            Outbound(
                rank_name(name, rank),
                Message("state", {"slice": index}, payload_of(params_Q), "transfer"),
            )
            for name, rank in each.owners.items()
            if name != source
        ]

    def _on_buffers(self, peer: str, message: Message) -> list[Outbound]:
        """Handle the model buffers that come with the initial or the final parameters."""
        if _BUFFERS not in self._missing:
            return []
        layout, first = self.buffer_layout, rank_name(self._source, 0)
        if peer != first:
            raise FrameError(f"'{peer}' sent model buffers that it was not asked for")
        if len(message.payload) != layout.size_bytes:
            raise FrameError(f"the model buffers of '{peer}' have {len(message.payload)} bytes")
        values_B = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
        if not layout.is_finite(values_B):
            raise NonFiniteError(f"the model buffers of '{peer}' are not finite")
        self.buffers_B = values_B
        if self.stage is Stage.ENDING:
            return self._arrived(_BUFFERS)
        self._arrived(_BUFFERS)
        shared = Message("buffers", {}, bytes(message.payload), "transfer")
        ranks = (rank_name(n, r) for n, each in self._regions.items() for r in each.hellos)
        return [Outbound(rank, shared) for rank in ranks if rank != first]

    def _everything(self) -> set[int]:
        """Return the parts of the model that the source must send."""
        return {*range(len(self.slices)), *([_BUFFERS] if self.buffer_layout.entries else [])}

    def _arrived(self, part: int) -> list[Outbound]:
        """Note a part of the model; the run continues, or ends, once all of them are here."""
        self._missing.discard(part)
        if self._missing:
            return []
        if self.stage is not Stage.ENDING:
            self.stage = Stage.TRAINING
            return []
        self.stage = Stage.DONE
        return self._all("over", list(self._regions))

    # ------------------------------------------------------------------ updates

    def _on_update(self, peer: str, message: Message) -> list[Outbound]:
        name = region_of(peer)
        region = self._regions.get(name)
        if region is None or self.stage not in (Stage.TRAINING, Stage.STARTING):
            raise JoinRefusedError(f"region '{name}' takes no part in the run")
        rank = rank_of(peer)
        rows = fields.count(message.meta, "rank_rows")
        index = fields.optional_count(message.meta, "slice")
        own = {k: v for k, v in message.meta.items() if k not in _RANK_FIELDS}
        update = read_update(own, message.payload)
        if update.region != name:
            raise FrameError(f"'{peer}' sent an update of region '{update.region}'")
        if update.attempt < region.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        if update.attempt > region.attempt:
            raise FrameError(f"'{peer}' sent an update of a process group that has not joined")
        self._check_agrees(name, region, rank, update)
        if not region.headers:
            region.since_s = self._now_s()
        region.headers[rank] = update, rows
        if "rank_loss" in message.meta:
            region.losses[rank] = fields.number(message.meta, "rank_loss")
        if index is not None:
            if index >= len(self.slices) or self.slices[index].owners[name] != rank:
                raise FrameError(f"'{peer}' sent slice {index}, which is not its own")
            region.parts[index] = replace(update, buffers_E=no_buffers())
        if update.buffers_E.numel():
            region.buffers[rank] = update.buffers_E
        if len(region.headers) < region.world_size or len(region.parts) < len(self.slices):
            return []
        return self._take(name, region)

    def _check_agrees(self, name: str, region: _Region, rank: int, update: UpdateMessage) -> None:
        for other, (known, _) in region.headers.items():
            mine, theirs = _decided(update), _decided(known)
            if mine != theirs:
                differs = ", ".join(
                    f"{key} {mine[key]} and {theirs[key]}"
                    for key in mine
                    if mine[key] != theirs[key]
                )
                raise RanksDisagreeError(
                    f"region '{name}': ranks {rank} and {other} differ in {differs}"
                )

    def _take(self, name: str, region: _Region) -> list[Outbound]:
        """Take in a region's update, which is complete."""
        headers = [header for header, _ in region.headers.values()]
        rows = sum(count for _, count in region.headers.values())
        step_s = max(header.step_s for header in headers)
        exchange_s = max(header.exchange_s for header in headers)
        parts = [
            replace(region.parts[index], num_samples=rows, step_s=step_s, exchange_s=exchange_s)
            for index in range(len(self.slices))
        ]
        losses = [
            (region.losses[r], n) for r, (_, n) in region.headers.items() if r in region.losses
        ]
        whole = replace(parts[0], buffers_E=self._combined(name, region))
        region.parts.clear()
        region.headers.clear()
        region.losses.clear()
        region.buffers.clear()
        self._buffers.check(whole)
        checked = [  # all of them, before any averager takes one in
            averager.checked(part) for averager, part in zip(self.averagers, parts, strict=True)
        ]
        self._buffers.take(whole)
        now_s = self._now_s()
        replies = []
        for averager, part in zip(self.averagers, checked, strict=True):
            averager.at(now_s)
            replies.append(averager.on_update(part))
        first, weight = parts[0], sum(n for _, n in losses)
        region.open, region.sent_bytes = first, sum(part.size_bytes for part in parts)
        region.steps += first.steps
        compute_s = first.steps * first.step_s
        before_s, region.stepped_s = region.stepped_s or now_s - compute_s, now_s
        self._emit(
            "step",
            region=name,
            step=region.steps,
            samples=rows,
            loss=sum(loss * n for loss, n in losses) / weight if weight else None,
            compute_s=compute_s,
            wait_s=max(0.0, now_s - before_s - compute_s),
            start_s=now_s - compute_s,
        )
        return self._answers(replies)

    def _combined(self, name: str, region: _Region) -> Tensor:
        """Return the model buffers of a region from those of its ranks, uint8 (E,)."""
        size = self._buffers.size_bytes
        ranks = range(region.world_size)
        vectors = [region.buffers.get(rank, no_buffers()) for rank in ranks]
        if any(vector.numel() != size for vector in vectors):
            found = [vector.numel() for vector in vectors]
            raise FrameError(f"region '{name}': model buffers of {found} bytes, not {size} each")
        if not size:
            return no_buffers()
        rows = [float(region.headers[rank][1]) for rank in ranks]
        return self.buffer_layout.combine(vectors, rows if any(rows) else [1.0] * len(rows))

    def _answers(self, replies: Sequence[Sequence[ReplyMessage]]) -> list[Outbound]:
        """Return the answers of all slices' averagers, for the ranks that own the slices."""
        found: list[Outbound] = []
        first = {reply.to: reply for reply in replies[0]} if replies else {}
        with_buffers = {each.to: each for each in self._buffers.attach(list(first.values()))}
        has_buffers: set[str] = set()  # ranks whose answer has them
        save: Meta = {}
        at_barrier = any(reply.barrier is not None for reply in first.values())
        cuts = False
        if at_barrier:
            self._at_barrier(list(first.values()))
            save = self._met()
            joined = [n for n in self.averagers[0].view.joining if n in self._regions]
            cuts = not all(self._has_cuts(n, self._regions[n]) for n in joined)
            save |= {"cuts": True} if cuts else {}
        for index, of_slice in enumerate(replies):
            if {reply.to for reply in of_slice} != first.keys():
                raise InvariantError("the averagers of two slices answer different regions")
            for reply in of_slice:
                owner = rank_name(reply.to, self.slices[index].owners[reply.to])
                own = reply if owner in has_buffers else _with(reply, with_buffers[reply.to])
                has_buffers.add(owner)
                meta = {**reply_meta(own), **save, "slice": index}
                found.append(Outbound(owner, Message("reply", meta, payload_bytes(own), "reply")))
        for name, reply in first.items():
            region = self._regions.get(name)
            if region is None:
                continue
            owners = {each.owners[name] for each in self.slices}
            empty = replace(reply, payload_P=torch.empty(0), coded=None, against=None)
            empty = _with(empty, with_buffers[name])
            for rank in set(range(region.world_size)) - owners:
                meta = {**reply_meta(empty), **save, "slice": None}
                message = Message("reply", meta, payload_bytes(empty), "reply")
                found.append(Outbound(rank_name(name, rank), message))
            self._note_exchange(
                name,
                region,
                reply,
                sum(
                    each.size_bytes for of_slice in replies for each in of_slice if each.to == name
                ),
            )
        found += self._cut_again() if cuts else []
        return found + (self._admit_next() if self._joining else [])

    def _note_exchange(
        self, name: str, region: _Region, reply: ReplyMessage, received_bytes: int
    ) -> None:
        """Record the answer to a region's update."""
        update, layout = region.open, self.layout
        if update is None or layout is None:
            return
        start, stop = self.terms.bounds_in(((0, layout.size),), layout.size)[reply.fragment]
        self._emit(
            "exchange",
            region=name,
            seq=reply.seq,
            start_s=region.since_s,
            bytes_sent=region.sent_bytes,
            bytes_received=received_bytes,
            bytes_before=4 * (stop - start),
            blocking=self.terms.strategy.traits.exchange.blocking == "always",
            held_s=self._now_s() - region.since_s,
            staleness=max(0, reply.version - update.base_version - 1),
            round=reply.version,
        )
        region.open = None

    def _on_evaluation(self, peer: str, message: Message) -> None:
        """Add up the sums of all ranks of a region, and of all regions, at one step."""
        name, step = region_of(peer), fields.count(message.meta, "version")
        if name not in self._regions:
            return
        is_final = fields.flag(message.meta, "final")
        sums = read_stats(message.meta, message.payload)
        found = self._evaluations.setdefault((step, is_final), {})
        found.setdefault(name, {})[rank_of(peer)] = fields.count(message.meta, "rows"), sums
        own = found[name]
        if len(own) < self._regions[name].world_size:
            return
        self._emit_evaluation(name, step, list(own.values()), final=is_final)
        self._complete_evaluations()

    def _complete_evaluations(self) -> None:
        """Add up the evaluations that all regions have reported."""
        for (step, is_final), found in sorted(self._evaluations.items()):
            if any(len(found.get(n, {})) < e.world_size for n, e in self._regions.items()):
                continue
            parts = [part for name in self._regions for part in found[name].values()]
            self._emit_evaluation(None, step, parts, final=is_final)
            for each in [key for key in self._evaluations if key <= (step, is_final)]:
                del self._evaluations[each]  # earlier ones are not completed any longer

    def _emit_evaluation(
        self,
        region: str | None,
        step: int,
        parts: Sequence[tuple[int, Mapping[str, list[float]]]],
        *,
        final: bool,
    ) -> None:
        rows = sum(count for count, _ in parts)
        names = sorted({name for _, sums in parts for name in sums})
        totals = {
            name: [
                sum(each)
                for each in zip_longest(*(s.get(name, ()) for _, s in parts), fillvalue=0.0)
            ]
            for name in names
        }
        metrics = {name: sum(total) / rows for name, total in totals.items() if rows}
        self._emit(
            "eval",
            region=region,
            step=step,
            metrics=metrics,
            samples=rows,
            final=final,
            sums=totals,
        )

    def _on_finished(self, peer: str) -> list[Outbound]:
        """Handle the end of a rank's training; collect the model once all ranks have ended."""
        region = self._regions.get(region_of(peer))
        if region is None or self.stage is not Stage.TRAINING:
            return []
        region.finished.add(peer)
        return self._ended()

    def _ended(self) -> list[Outbound]:
        """Collect the model, if all regions have finished."""
        if not self._regions:
            return []  # all are lost
        if not all(len(each.finished) == each.world_size for each in self._regions.values()):
            return []
        self.stage, self._missing = Stage.ENDING, self._everything()
        found = self._all("collect", [self._source])
        for name in list(self._joining):
            error = JoinRefusedError(f"run '{self.terms.name}' ended before '{name}' could join")
            found += self._refuse(name, error)
            self._stop_joining(name)
        return found

    @property
    def _source(self) -> str:
        """The region that sends the initial and the final parameters."""
        return min(self._regions)

    def _all(self, kind: str, names: Sequence[str]) -> list[Outbound]:
        """Return a message without content for all ranks of some regions."""
        message = Message(kind, {}, b"", "control", CONTROL)
        return [
            Outbound(rank_name(name, rank), message)
            for name in names
            for rank in range(self._regions[name].world_size)
        ]

    def _on_failed(self, peer: str, meta: Meta) -> list[Outbound]:
        """Handle the end of a rank's loop by an error: the other ranks cannot continue."""
        name, cause = region_of(peer), fields.text(meta, "cause")
        region = self._joining.get(name) or self._regions.get(name)
        if region is None or fields.count(meta, "attempt") != region.attempt:
            return []  # of an earlier process group
        error = RegionLostError(f"rank '{peer}' has failed: {cause}")
        told = [each for each in self._refuse(name, error) if each.peer != peer]
        return told + self.on_lost(name, error.message)

    def _refuse(self, name: str, error: GeoRayError, peers: Sequence[str] = ()) -> list[Outbound]:
        """Tell all ranks of a region why it cannot continue.

        Args:
            name: the region.
            error: the reason.
            peers: further endpoints to tell.
        """
        _LOGGER.warning("region '%s' is refused: %s", name, error.message)
        region = self._joining.get(name) or self._regions.get(name)
        ranks = [] if region is None else [rank_name(name, rank) for rank in region.hellos]
        attempt = 0 if region is None else region.attempt
        return [_refusal(peer, error, attempt) for peer in dict.fromkeys((*ranks, *peers))]

    def _emit(self, kind: str, **values: Any) -> None:
        self._events.append({"kind": kind, "t_s": self._now_s(), **values})


def _number(peer: str) -> int:
    """Return the rank of an endpoint; -1 for others."""
    try:
        return rank_of(peer)
    except FrameError:
        return -1


def _refusal(peer: str, error: GeoRayError, attempt: int) -> Outbound:
    """Return the message that a rank cannot continue.

    Args:
        peer: the rank.
        error: the reason.
        attempt: incarnation of the region's training; 0: any.
    """
    meta = {**refusal_meta(0, error), "attempt": attempt}
    return Outbound(peer, Message("refused", meta, b"", "control", CONTROL))


def _with(reply: ReplyMessage, other: ReplyMessage) -> ReplyMessage:
    """Return an answer with the model buffers of another one."""
    return replace(reply, buffers_E=other.buffers_E, buffers_weight=other.buffers_weight)


def _cut(
    saved: Sequence[SavedSlice], part: Slice, averager: Averager
) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
    """Return the saved state of a slice, which the checkpoint may have in other slices.

    References and coding errors are kept for slices that are the same, and dropped for others.

    Raises:
        CheckpointMismatchError: the strategy's state cannot be cut again.
    """
    for each in saved:
        if each.ranges == part.ranges:
            return each.tensors, each.control
    names = {name for each in saved for name in each.tensors if not name.startswith(AVERAGER_WIRE)}
    size = max(stop for each in saved for _, stop in each.ranges)
    fragments = fragment_bounds(size, averager.strategy.traits.exchange.fragments)
    tensors = {}
    for name in sorted(names):
        of_fragment = _OF_FRAGMENT.match(name)
        within = ((0, size),) if of_fragment is None else (fragments[int(of_fragment[1])],)
        pieces = [(common(each.ranges, within), each.tensors[name]) for each in saved]
        for ranges, vector in pieces:
            if vector.shape != (sum(stop - start for start, stop in ranges),):
                raise CheckpointMismatchError(
                    f"the averager's state '{name}' cannot be divided among other ranks",
                    fix="Resume with the sharding and the number of ranks of the checkpoint.",
                )
        tensors[name] = gathered(pieces, common(part.ranges, within))
    control = {k: v for k, v in saved[0].control.items() if k != "buffer_rows"}
    return tensors, {**control, "wire": averager.wire.export()[1]}


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _check_rank(name: str, hello: Hello, known: _Region) -> None:
    """Refuse a rank that counts other ranks than those of its region that are known."""
    if hello.world_size != known.world_size or not 0 <= hello.rank < known.world_size:
        raise RanksDisagreeError(
            f"region '{name}': rank {hello.rank} counts {hello.world_size} ranks, another "
            f"one {known.world_size}"
        )


def _decided(update: UpdateMessage) -> dict[str, object]:
    """Return the values that all ranks of a region decide alike."""
    return {
        "seq": update.seq,
        "base_version": update.base_version,
        "view": update.view,
        "steps": update.steps,
        "final": update.final,
        "fragment": update.fragment,
    }


def payload_of(vector: Tensor) -> memoryview:
    """Return a fp32 vector as bytes."""
    return memoryview(vector.detach().contiguous().numpy().data).cast("B")
