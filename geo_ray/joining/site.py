"""The interface for a training loop of the user: `join`, `JoinedRegion` and `JoinedTraining`.

A rank has one endpoint, which only dials. The thread that trains decides and merges; encoding,
sending and decoding happen in another thread (`_Exchanger`), so that an exchange costs the loop
only the copy of its parameters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from geo_ray.base.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    DeadlineExceededError,
    GeoRayError,
    JoinRefusedError,
    LinkDownError,
    LoopMisuseError,
    ServerLostError,
)
from geo_ray.base.memory import trim_heap
from geo_ray.data.tasks.model_buffers import BufferRule
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import SCHEME, EndpointBook
from geo_ray.joining.layout import (
    Layout,
    Ranges,
    holder_of,
    holder_starts,
    positions,
    put,
    taken,
    within,
)
from geo_ray.joining.link import REPLACED, ServerLink
from geo_ray.joining.pieces import PIECE, SIZE, Arriving, divided, piece_ranges, size_of
from geo_ray.joining.protocol import (
    ADDRESSEE,
    SERVER,
    Hello,
    JoinTerms,
    Welcome,
    copy_message,
    payload_of,
    rank_name,
    rank_of,
    read_copy,
)
from geo_ray.joining.rank import (
    JoinedModel,
    RankExchange,
    RankState,
    SliceWire,
    states_of,
    strategy_problems,
)
from geo_ray.joining.rank_saver import KINDS as SAVER_KINDS
from geo_ray.joining.rank_saver import LoopState, RankSaver, root_of, saved_states
from geo_ray.joining.vector import ModuleBuffers, ParameterVector
from geo_ray.storage.folders import Root
from geo_ray.training.effects import SendUpdate
from geo_ray.training.messages import ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.model_buffers import REGION_PREFIX
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.wire_format import (
    as_bytes,
    as_tensor,
    payload_bytes,
    read_refusal,
    read_reply,
    stats_message,
    update_meta,
)
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

ENDPOINTS_SUFFIX: Final = ".endpoints.json"
"""Ending of the file next to a region's credentials that has the run's endpoint list."""
_LOOK_S: Final = 0.5
_NOTICE_S: Final = 2.0
"""Duration of a wait that is reported."""
_AGAIN_S: Final = 60.0
"""Seconds between two reports of a wait."""
_CAUSE_CHARS: Final = 500
_MARKS: Final = (ADDRESSEE, "slice", "save", "halts", "cuts", SIZE)
"""Fields of an answer that are not the strategy's."""
_NOBODY: Final = -1  # number of no holder
_MOST_UNUSED: Final = 1000  # batches, more than one step accumulates
T = TypeVar("T")


def parse_address(text: str) -> Address:
    """Return host and port of an address such as ``geo-ray://10.0.0.5:7447``.

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = text.removeprefix(SCHEME).rpartition(":")
    if not text.startswith(SCHEME) or not host or not port.isdecimal():
        raise ConfigError(
            f"'{text}' is no address of a run",
            fix="Use the address that `geo-ray serve` printed: geo-ray://HOST:PORT.",
        )
    return host.strip("[]"), int(port)


def join(
    address: str,
    *,
    region: str,
    credentials: str | Path | JoinCredentials,
    group: dist.ProcessGroup | None = None,
    transport: TransportConfig | None = None,
    wait_s: float = 600.0,
) -> JoinedRegion:
    """Join a run as a region. Every rank of the region's process group calls it.

    The process needs only outbound connections.

    Args:
        address: where the run is served, such as ``geo-ray://10.0.0.5:7447``.
        region: name of the region.
        credentials: file that `geo-ray serve` wrote for the region, or its content.
        group: process group of the region's ranks; None: this process is the only one.
        transport: settings of the connection.
        wait_s: longest wait for the server and for the other regions at the start, and longest
            time without the server while training.

    Raises:
        ConfigError: the address or the region's name is wrong.
        CertificateError: the credentials cannot be used.
        ServerLostError: the server cannot be reached.
    """
    name = "the file" if isinstance(credentials, JoinCredentials) else credentials
    own = (
        credentials
        if isinstance(credentials, JoinCredentials)
        else JoinCredentials.read(credentials)
    )
    if own.region != region:
        raise ConfigError(
            f"{name} is for region '{own.region}', not '{region}'",
            fix="Use the file of this region.",
        )
    rank, world_size, attempt = 0, 1, time.time_ns() // 1_000_000
    if group is not None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        shared: list[Any] = [attempt]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0), group=group)
        attempt = int(shared[0])
    ranks = _Ranks(region, rank, world_size, attempt, group)
    path = None
    if not isinstance(credentials, JoinCredentials):
        path = Path(credentials).with_suffix(ENDPOINTS_SUFFIX)
    book = EndpointBook(own.run_id, own.certificate.ca_pem, parse_address(address), path)
    return JoinedRegion(book, ranks, own, transport or TransportConfig(), wait_s)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """This rank and its region."""

    region: str
    rank: int
    world_size: int
    attempt: int
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.group is not None and self.world_size > 1:
            members = dist.get_process_group_ranks(self.group)
            control = dist.new_group(members, backend="gloo")  # flags need no device
            object.__setattr__(self, "control", control)

    @property
    def name(self) -> str:
        """Name of this rank's endpoint."""
        return rank_name(self.region, self.rank)

    def all_true(self, flag: bool) -> bool:
        """Return whether a flag is true in every rank; collective."""
        if self.control is None:
            return flag
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.control)
        return bool(value.item())


class JoinedRegion:
    """A region's connection to a run; see `join`.

    Attributes:
        region: its name.
    """

    def __init__(
        self,
        book: EndpointBook,
        ranks: _Ranks,
        credentials: JoinCredentials,
        transport: TransportConfig,
        wait_s: float,
    ) -> None:
        self._ranks, self._wait_s = ranks, wait_s
        self._mail = _Mail()
        self._is_training = False
        self._run_id = credentials.run_id
        self._attempt, self._trainings = ranks.attempt, 0
        self._saver: RankSaver | None = None  # while it trains
        self._open = ExitStack()  # the training between `begin` and `finish`
        self._link = ServerLink(
            ranks.name, ranks.attempt, credentials, book, self._on_message, transport
        )
        self._holders = _Holders(self._link, self._mail, transport.send_deadline_s)
        try:
            self._await_server(book, wait_s)
        except LinkDownError as error:
            self._link.close(0.0)
            raise ServerLostError(
                f"region '{ranks.region}': no run has answered at {book.shown} within "
                f"wait_s = {wait_s:g} s: {error.message}"
            ) from None
        except BaseException:
            self._link.close(0.0)
            raise

    def _await_server(self, book: EndpointBook, wait_s: float) -> None:
        """Wait for the connection; report a wait that is not short, again and again.

        Raises:
            LinkDownError: there is none after ``wait_s``.
        """
        notices = _Notices(wait_s)
        while True:
            try:
                return self._link.connect(min(notices.next_s, notices.left_s))
            except LinkDownError as error:
                if notices.left_s == 0:
                    raise
                cause = error.message
            if notices.is_due():
                log.warning(
                    "region '%s' waits for the run at %s, for %.0f s more at most (wait_s): %s",
                    self.region,
                    book.shown,
                    notices.left_s,
                    cause,
                )

    @property
    def region(self) -> str:
        """Its name."""
        return self._ranks.region

    def close(self) -> None:
        """Close the connection."""
        self._link.close(2.0)

    def __enter__(self) -> JoinedRegion:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._open.__exit__(*error)
        finally:
            self.close()

    def begin(
        self,
        model: nn.Module,
        *,
        buffers: Mapping[str, BufferRule] | None = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        checkpoints: str | Path | None = None,
        same: Mapping[str, object] | None = None,
    ) -> JoinedTraining:
        """Begin a training where a block would not do, as in callbacks; see `training`.

        The training lasts until `finish`. If the block of the region ends before, the training has
        failed, as if its own block had ended.
        """
        block = self.training(
            model,
            buffers=buffers,
            state=state,
            rank_state=rank_state,
            checkpoints=checkpoints,
            same=same,
        )
        return self._open.enter_context(block)

    def finish(self) -> None:
        """End the training that `begin` has begun.

        Raises:
            LoopMisuseError: the run is not over.
        """
        self._open.close()

    @contextmanager
    def training(
        self,
        model: nn.Module,
        *,
        buffers: Mapping[str, BufferRule] | None = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        checkpoints: str | Path | None = None,
        same: Mapping[str, object] | None = None,
    ) -> Iterator[JoinedTraining]:
        """Train a model in the run; every rank calls it.

        In the block the model has the run's parameters. The block must run until
        `JoinedTraining.done`. If the run is resumed from a checkpoint of which the region has its
        files, ``state`` and ``rank_state`` are loaded, too. After an error the region may train
        again: as if it were restarted, it waits for the start, or begins with a copy of another
        region's state.

        Args:
            model: module whose trained parameters are exchanged, after sharding if it is sharded.
            buffers: rules for buffers and frozen parameters, by pattern of names, such as
                ``{"teacher.*": "mean"}``; see the guide of tasks. Running statistics of torch's
                normalization layers are ``mean`` without a rule.
            state: what checkpoints contain besides the parameters: optimizers, and other objects
                with ``state_dict`` and ``load_state_dict`` that are equal in all ranks, such as
                learning-rate schedules.
            rank_state: such objects of which each rank has its own, such as data loaders.
            checkpoints: folder for the region's files of checkpoints, which all ranks of the region
                see: a directory or an ``s3://`` address. None: none are written. Then a resumed run
                gives the region a copy of another region's parameters.
            same: what must be equal in all processes of all regions, by name, such as
                ``{"vocabulary": tokenizer.get_vocab()}``: plain values or bytes. Only digests are
                sent.

        Raises:
            ConfigError: there is ``state`` and no folder for it, or ``same`` is not plain.
            CheckpointError: the region's files of a checkpoint cannot be loaded, or ``state`` has
                a value that cannot be saved.
            ModelMismatchError: another region has another model.
            TaskStateError: a rule fits no buffer.
            JoinRefusedError: the run does not accept the region.
            LoopMisuseError: the block ends before the run does.
        """
        if self._is_training:
            raise LoopMisuseError(f"region '{self.region}' trains already")
        for name, each in {**(state or {}), **(rank_state or {})}.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigError(
                    f"state '{name}': a {type(each).__name__} cannot be saved",
                    fix="Pass objects with `state_dict` and `load_state_dict`, such as optimizers.",
                )
        if checkpoints is None and (state or rank_state):
            raise ConfigError(
                "`state` is given without `checkpoints`, so that it would not be saved",
                fix="Pass checkpoints=FOLDER, which all ranks of the region see.",
            )
        agreed = _digests(same or {})
        self._is_training = True
        self._attempt = self._ranks.attempt + self._trainings
        self._trainings += 1
        self._mail.clear()  # of an earlier training
        try:
            with ExitStack() as stack:
                try:
                    layout = Layout.of(model)
                    vector = ParameterVector(model, layout, self._ranks.group)
                    own = ModuleBuffers.of(model, buffers)
                    loop = LoopState(model, dict(state or {}), dict(rank_state or {}), own)
                    loop.check()
                    root = None
                    if checkpoints is not None:
                        root = root_of(checkpoints, self._run_id, self.region)
                        self._saver = stack.enter_context(closing(self._new_saver(root)))
                    exchange, cutter = self._start(layout, vector, own, loop, root, agreed)
                    ranks, wait_s = self._ranks, self._wait_s
                    exchanger = _Exchanger(self._holders, exchange, ranks, wait_s)
                    stack.enter_context(closing(exchanger))
                    sync = JoinedTraining(
                        exchange, exchanger, ranks, loop, self._saver, cutter, self._run_id
                    )
                    sync.settle()
                    yield sync
                    sync.check_ended()
                    sync.end(vector, own)
                except BaseException as error:
                    self._tell_failed(error)  # before the saver, which may hang, is closed
                    raise
        finally:
            self._is_training, self._saver = False, None

    def _new_saver(self, root: Root) -> RankSaver:
        ranks = self._ranks
        return RankSaver(self._link, root, ranks.rank, ranks.world_size, self._attempt)

    def _on_message(self, peer: str, message: Message) -> None:
        saver = self._saver
        if peer != SERVER:
            if message.meta.get(ADDRESSEE) == self._attempt:
                self._mail.put(rank_of(peer), message)
            return
        if message.kind == "refused" and message.meta.get("attempt") not in (0, self._attempt):
            return  # of an earlier training
        if message.kind not in SAVER_KINDS:
            self._mail.put(0, message)
        elif saver is not None:
            saver.on_message(message)

    def _tell_failed(self, error: BaseException) -> None:
        """Tell the server that this rank ends, so that other regions do not wait for it."""
        cause = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS]
        meta: Meta = {"cause": cause, "attempt": self._attempt}
        failed = Message("failed", meta, b"", "control", CONTROL)
        with suppress(GeoRayError):
            self._link.send(failed, 0.0)
            self._link.flush(_LOOK_S)

    def _start(
        self,
        layout: Layout,
        vector: ParameterVector,
        buffers: ModuleBuffers | None,
        loop: LoopState,
        root: Root | None,
        same: Mapping[str, str],
    ) -> tuple[RankExchange, _Cutter]:
        """Describe the model, wait for all regions, and load the run's parameters."""
        ranks = self._ranks
        hello = Hello(
            ranks.region,
            ranks.rank,
            ranks.world_size,
            self._attempt,
            layout,
            vector.share,
            None if root is None else tuple(n for n, whole in root.ids().items() if whole),
            () if buffers is None else buffers.entries,
            same,
        )
        self._link.send(hello.message())
        while (message := self._receive(None, "the other regions", 0)).kind != "welcome":
            pass  # left over from an earlier training
        welcome = Welcome.read(message)
        self._connect_holders(welcome)
        terms = welcome.terms
        for problem in strategy_problems(terms.strategy):
            raise ConfigError(problem)
        bounds = terms.bounds_in(vector.share, layout.size)
        cutter = _Cutter(terms, layout, vector.share, ranks.region)
        slices = cutter.slices(welcome.slices)
        model = JoinedModel(terms.strategy, vector, bounds, in_pieces=terms.in_pieces)
        begins = not welcome.copies and welcome.checkpoint is None
        if begins:
            self._load(slices, vector, buffers, is_source=welcome.is_source)
            model.start()
        plan = terms.server_plan(ranks.region, self._attempt)
        local = max(1, terms.strategy.traits.region.worker_steps)
        exchange = RankExchange(
            plan,
            model,
            buffers,
            slices=slices,
            local_steps=local,
            eval_every=terms.eval_every,
        )
        if welcome.checkpoint is not None and root is not None:
            own = [ranges for _, ranges in sorted(welcome.slices.items())]
            loop.load(root, welcome.checkpoint, ranks.rank)
            if buffers is not None:
                buffers.start(buffers.layout.read(buffers.module))
            states = saved_states(root, welcome.checkpoint, own)
            exchange.restore(states_of(states, own, [each.wire for each in slices]))
        elif not begins:
            if root is not None and hello.saved:
                self._load_own(loop, root, max(hello.saved))
            exchange.restore(self._copies(slices, buffers))
        exchange.requests.view = max(exchange.requests.view, welcome.view)
        if welcome.is_donor:
            _send_copies(self._holders, exchange)
        return exchange, cutter

    def _connect_holders(self, welcome: Welcome) -> None:
        """Connect to the other processes that hold slices.

        Raises:
            ServerLostError: one cannot be reached.
            GeoRayError: the server, which knows that, has refused the region.
        """
        until_s = time.monotonic() + self._wait_s
        try:
            self._link.connect_holders(welcome.holders, min(_NOTICE_S, self._wait_s))
        except LinkDownError as error:
            log.warning("processes that hold parts of the averagers: %s", error.message)
        while lacking := self._link.lacking:
            if time.monotonic() > until_s:
                where = [":".join(map(str, welcome.holders[holder - 1])) for holder in lacking]
                raise ServerLostError(
                    f"processes that hold parts of the run's averagers cannot be reached within "
                    f"wait_s = {self._wait_s:g} s: {', '.join(where)}",
                    fix="Let this machine reach the ports of all holders, see `serve.holders`.",
                )
            self._mail.check_refused(_LOOK_S)

    def _load_own(self, loop: LoopState, root: Root, checkpoint: int) -> None:
        """Load optimizers and the like from the region's newest files, which may be a bit older.

        The parameters are copies of another region's. Without its files the region could join, too.
        """
        try:
            loop.load(root, checkpoint, self._ranks.rank)
        except CheckpointError as error:
            log.warning("the loop begins with a new state: %s", error.message)

    def _copies(self, slices: list[SliceWire], buffers: ModuleBuffers | None) -> list[RankState]:
        """Wait for the copy of another region's state; load its model buffers."""
        found: dict[int | None, RankState] = {}
        while len(found) < max(1, len(slices)):
            index, state = read_copy(self._receive(("copy",), "the state of another region"))
            own = {k: v for k, v in state.tensors.items() if k.startswith(REGION_PREFIX)}
            rest = {k: v for k, v in state.tensors.items() if k not in own}
            found[index] = replace(state, tensors=rest)
            if buffers is not None:
                buffers.restore({k: v.view(torch.uint8) for k, v in own.items()})
        return [found[each.index] for each in slices] or list(found.values())

    def _load(
        self,
        slices: list[SliceWire],
        vector: ParameterVector,
        buffers: ModuleBuffers | None,
        *,
        is_source: bool,
    ) -> None:
        """Send the initial parameters and model buffers, or load them."""
        params_S = vector.read()
        awaits_buffers = buffers is not None
        if is_source:
            if self._ranks.rank == 0:
                _send_buffers(self._link, buffers)
                awaits_buffers = False
            for each in slices:
                _send_state(self._holders, each, taken(params_S, each.places))
            self._link.flush(self._wait_s)
        places = {} if is_source else {each.index: each.places for each in slices}
        missing = sum(stop - start for each in places.values() for start, stop in each)
        while missing or awaits_buffers:
            message = self._receive(("state", "buffers"), "the initial parameters")
            if message.kind == "state":
                values = as_tensor(memoryview(message.payload))
                start = fields.count(message.meta, "start")
                own = places[fields.count(message.meta, "slice")]
                put(params_S, within(own, start, start + values.numel()), values)
                missing -= values.numel()
            elif buffers is not None:
                buffers.start(torch.frombuffer(bytearray(message.payload), dtype=torch.uint8))
                awaits_buffers = False
        if not is_source:
            vector.write(params_S)

    def _receive(
        self, kinds: tuple[str, ...] | None, what: str, holder: int | None = None
    ) -> Message:
        """Wait for a message of the start; ``kinds``: None: of any kind."""
        return _await_message(self._mail, kinds, what, self._wait_s, holder)


class _Mail:
    """Messages of the server and of other holders; those of each are in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._kept: deque[tuple[int, Message]] = deque()

    def put(self, holder: int, message: Message) -> None:
        """Add a message; ``holder``: its sender, 0 for the server."""
        self._queue.put((holder, message))

    def clear(self) -> None:
        """Drop all messages."""
        self._kept.clear()
        while not self._queue.empty():
            self._queue.get()

    def get(self, holder: int | None, timeout_s: float) -> Message:
        """Return the next message of a holder, or the reason why the server gives no other.

        Args:
            holder: its number; None: of any.
            timeout_s: longest wait for each message.

        Raises:
            queue.Empty: none came in time.
        """
        for index, (sender, message) in enumerate(self._kept):
            if holder in (None, sender):
                del self._kept[index]
                return message
        while True:
            sender, message = self._queue.get(timeout=timeout_s)
            if holder in (None, sender) or message.kind in ("refused", REPLACED):
                return message
            self._kept.append((sender, message))

    def check_refused(self, timeout_s: float) -> None:
        """Keep all messages; wait for one at most so long.

        Raises:
            GeoRayError: the server gives no others, for this reason.
        """
        with suppress(queue.Empty):
            _check_refused(self.get(_NOBODY, timeout_s))


@dataclass(frozen=True, slots=True)
class _Holders:
    """Sends to the processes that hold slices.

    Attributes:
        link: connections to them.
        mail: messages of the server.
        longest_s: longest wait for space in an outbox.
    """

    link: ServerLink
    mail: _Mail
    longest_s: float

    def send(self, holder: int, message: Message) -> None:
        """Queue a message.

        Raises:
            DeadlineExceededError: the holder does not keep up, or cannot be reached.
            GeoRayError: the server, which knows that, has refused the region.
        """
        until_s = time.monotonic() + self.longest_s
        while True:
            try:
                return self.link.send_to(holder, message, _LOOK_S)
            except DeadlineExceededError:
                if time.monotonic() > until_s:
                    raise
                self.mail.check_refused(0.0)


class _Notices:
    """Decides when a long wait is reported.

    Args:
        wait_s: longest wait.
    """

    def __init__(self, wait_s: float) -> None:
        now_s = time.monotonic()
        self._at_s, self._until_s = now_s + _NOTICE_S, now_s + wait_s

    @property
    def next_s(self) -> float:
        """Seconds until the next report."""
        return max(0.0, self._at_s - time.monotonic())

    @property
    def left_s(self) -> float:
        """Seconds until the end of the wait."""
        return max(0.0, self._until_s - time.monotonic())

    def is_due(self) -> bool:
        """Return whether to report the wait now; the next report is due later."""
        if self.next_s > 0:
            return False
        self._at_s = time.monotonic() + _AGAIN_S
        return True


def _await_message(
    mail: _Mail,
    kinds: tuple[str, ...] | None,
    what: str,
    wait_s: float,
    holder: int | None = 0,
) -> Message:
    """Wait for a message of the server; ``kinds``: None: of any kind.

    Args:
        mail: messages.
        kinds: kinds that may come; None: any.
        what: what is awaited, for messages.
        wait_s: longest wait.
        holder: number of the sender; None: any.

    Raises:
        ServerLostError: it did not come in time.
        GeoRayError: the server refused the region.
    """
    notices = _Notices(wait_s)
    while True:
        try:
            message = mail.get(holder, _LOOK_S)
        except queue.Empty:
            if notices.is_due():
                log.warning(
                    "waiting for %s, for %.0f s more at most (wait_s); `geo-ray status RUN` on the "
                    "server's machine shows which regions are missing",
                    what,
                    notices.left_s,
                )
            if notices.left_s == 0:
                raise ServerLostError(
                    f"{what} did not come within wait_s = {wait_s:g} s",
                    fix="See with `geo-ray status RUN` on the server's machine which regions are "
                    "missing, or set a larger `wait_s` of `geo_ray.join`.",
                ) from None
            continue
        _check_refused(message)
        if kinds is None or message.kind in kinds:
            return message
        raise JoinRefusedError(f"the server sent '{message.kind}' instead of {kinds}")


def _check_refused(message: Message) -> None:
    """Raise the error that a message of the server stands for, if any.

    Raises:
        ServerLostError: another server runs, and does not know this region.
        GeoRayError: the server refused the region.
    """
    if message.kind == REPLACED:
        raise ServerLostError(
            "the process that served the run was replaced; what it knew of this region is lost",
            fix="Start the loops of all regions again: the run continues from its newest "
            "checkpoint, or starts again if it has none.",
        )
    if message.kind == "refused":
        meta = {name: value for name, value in message.meta.items() if name != "attempt"}
        raise read_refusal(meta)[1]


def _send_state(holders: _Holders, each: SliceWire, params_Q: Tensor) -> None:
    """Send the parameters of a slice, fp32 (Q,), which must stay unchanged until they are there."""
    for start, stop in piece_ranges(params_Q.numel()):
        meta: Meta = {"slice": each.index, "start": start}
        part = Message("state", meta, payload_of(params_Q[start:stop]), "transfer")
        holders.send(each.holder, part)


def _send_buffers(link: ServerLink, buffers: ModuleBuffers | None) -> None:
    """Send the present model buffers, uint8 (B,)."""
    if buffers is not None:
        values_B = buffers.layout.read(buffers.module)
        link.send(Message("buffers", {}, as_bytes(values_B), "transfer"))


def _send_copies(holders: _Holders, exchange: RankExchange) -> None:
    """Send the state of a rank, from which other regions begin."""
    found = {} if exchange.model_buffers is None else exchange.model_buffers.tensors()
    buffers = {name: values_B.view(torch.float32) for name, values_B in found.items()}
    for each, state in zip(exchange.slices, exchange.copies(), strict=False):
        whole = replace(state, tensors={**state.tensors, **buffers})
        holders.send(each.holder, copy_message(each.index, whole))


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Makes the slices of a rank."""

    terms: JoinTerms
    layout: Layout
    share: Ranges
    region: str

    def slices(
        self, ranges_of: Mapping[int, Ranges], before: Sequence[SliceWire] = ()
    ) -> list[SliceWire]:
        """Return slices by number; those that existed before keep what they have not sent."""
        known = {each.ranges: each for each in before}
        starts = holder_starts(self.layout, self.terms.holders)
        found = []
        for index, ranges in sorted(ranges_of.items()):
            if ranges in known:
                found.append(replace(known[ranges], index=index))
                continue
            size = sum(stop - start for start, stop in ranges)
            wire = RegionWire(self.terms.wire_plan(self.layout, ranges), self.region, size)
            places, holder = positions(ranges, self.share), holder_of(starts, ranges)
            found.append(SliceWire(index, ranges, places, wire, holder))
        return found


class _Exchanger:
    """Encodes and sends updates, and decodes their answers, in a thread of its own.

    Attributes:
        halts: whether the training ends with the newest answers.
    """

    def __init__(
        self,
        holders: _Holders,
        exchange: RankExchange,
        ranks: _Ranks,
        wait_s: float,
    ) -> None:
        self._link, self._mail, self._exchange = holders.link, holders.mail, exchange
        self._holders = holders
        self._ranks, self._wait_s = ranks, wait_s
        self._orders: queue.SimpleQueue[UpdateMessage | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[ReplyMessage] | BaseException] = queue.SimpleQueue()
        self._ready: list[ReplyMessage] | BaseException | None = None
        self._saves: int | None = None
        self.halts = False
        self._cuts: Mapping[int, Ranges] | None = None
        self._sent_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="geo-ray-exchange", daemon=True)
        self._thread.start()

    def send(self, update: UpdateMessage) -> None:
        """Send an update; its payload must stay unchanged until it is answered."""
        self._sent_s = time.monotonic()
        self._orders.put(update)

    def send_copies(self) -> None:
        """Send the state of this rank, from which a joining region begins."""
        _send_copies(self._holders, self._exchange)

    def cuts(self) -> Mapping[int, Ranges] | None:
        """Return the slices of this rank after the newest answers, once; None: as before."""
        found, self._cuts = self._cuts, None
        return found

    def saves(self) -> int | None:
        """Return the checkpoint at whose barrier the newest answers were given, once."""
        found, self._saves = self._saves, None
        return found

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        self._link.send(message)

    def arrived(self) -> bool:
        """Return whether the answers have arrived, or the exchange has failed."""
        if self._ready is None and not self._answers.empty():
            self._ready = self._answers.get()
        return self._ready is not None

    def take(self) -> tuple[list[ReplyMessage], float]:
        """Wait for the answers of all slices; return them and the seconds since the update.

        Raises:
            GeoRayError: the exchange failed.
        """
        while self._ready is None:
            with suppress(queue.Empty):  # a signal that arrives before the wait does not end it
                self._ready = self._answers.get(timeout=_LOOK_S)
        found, self._ready = self._ready, None
        if isinstance(found, BaseException):
            raise found
        return found, time.monotonic() - self._sent_s

    def send_model(self, vector: ParameterVector, buffers: ModuleBuffers | None) -> None:
        """Send the final parameters of this rank."""
        params_S = vector.read()
        if self._ranks.rank == 0:
            _send_buffers(self._link, buffers)
        for each in self._exchange.slices:
            _send_state(self._holders, each, taken(params_S, each.places))

    def receive_end(self) -> Message:
        """Wait for what the server wants of a rank that has finished."""
        kinds, what = ("collect", "save", "over"), "the end of the run"
        return _await_message(self._mail, kinds, what, self._wait_s)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._answer_next():
            pass  # keeps no reference to an update between exchanges

    def _answer_next(self) -> bool:
        """Wait for an update and exchange it; return False at the end."""
        try:
            if not self._send_next():
                return False
            self._answers.put(self._receive_answers())
            trim_heap()  # of pieces
        except BaseException as error:  # raised by `take` in the thread that trains
            self._answers.put(error)
        return True

    def _send_next(self) -> bool:
        """Wait for an update and send it; return False at the end."""
        update = self._orders.get()
        if update is None:
            return False
        slices = self._exchange.slices
        common: Meta = {"rank_rows": update.num_samples}
        if update.loss is not None:
            common["rank_loss"] = update.loss
        parts = self._exchange.encoded(update)
        for each, part in zip(slices, parts, strict=True):
            meta = {**update_meta(part), **common, "slice": each.index}
            values = partial(self._exchange.values, each, part.payload_P)
            own = replace(part, buffers_E=no_buffers()) if each.holder else part
            for message in divided(meta, own, values):
                self._check_open()
                self._holders.send(each.holder, message)
        if not self._has_local:
            nothing = replace(update, payload_P=torch.empty(0))
            meta = {**update_meta(nothing), **common, "slice": None}
            self._link.send(Message("update", meta, payload_bytes(nothing), "update"))
        self._exchange.forget_sent()
        return True

    @property
    def _has_local(self) -> bool:
        """Whether the server itself holds a slice of this rank."""
        return any(each.holder == 0 for each in self._exchange.slices)

    def _receive_answers(self) -> list[ReplyMessage]:
        """Wait for the answers of all slices; return them decoded.

        The server answers every rank; without a slice if other processes hold all of the rank's.
        """
        slices = self._exchange.slices
        numbered = {each.index: each for each in slices}
        replies: dict[int | None, ReplyMessage] = {}
        has_cuts = False
        senders = [each.holder for each in slices] + ([] if self._has_local else [0])
        for holder in sorted(senders):
            message = self._next("reply", holder)
            own = {k: v for k, v in message.meta.items() if k not in _MARKS}
            has_cuts = has_cuts or "cuts" in message.meta
            if "save" in message.meta:
                self._saves = fields.count(message.meta, "save")
            self.halts = self.halts or "halts" in message.meta
            index = fields.optional_count(message.meta, "slice")
            reply = read_reply(own, message.payload)
            if index is not None:
                each = numbered[index]
                reply = self._with_values(each, reply, size_of(message), holder)
            replies[index] = reply
        if has_cuts:
            body = json.loads(bytes(self._next("slices").payload))
            self._cuts = {
                int(index): tuple((int(a), int(b)) for a, b in ranges) for index, ranges in body
            }
        if not slices:
            return list(replies.values())
        found = [each.wire.decode(replies[each.index]) for each in slices]
        whole = replies.get(None, found[0])  # has the model buffers
        found[0] = replace(found[0], buffers_E=whole.buffers_E, buffers_weight=whole.buffers_weight)
        return found

    def _with_values(
        self, each: SliceWire, reply: ReplyMessage, size: int | None, holder: int
    ) -> ReplyMessage:
        """Return an answer with the values that follow it, or merge these as they arrive.

        Args:
            each: the slice.
            reply: the answer.
            size: elements that follow it; None: it has its payload itself.
            holder: number of the sender.
        """
        merges = self._exchange.model.in_pieces
        if size is None and not merges:
            return reply
        if size is None:
            self._exchange.merge_piece(each, 0, reply.payload_P)
            return replace(reply, payload_P=reply.payload_P.to("meta"))
        payload_Q = torch.empty(size, device="meta" if merges else None)
        arriving = Arriving(size)
        while not arriving.is_complete:
            start, values = arriving.take(self._next(PIECE, holder))
            if merges:
                self._exchange.merge_piece(each, start, values)
            else:
                payload_Q[start : start + values.numel()] = values
        return replace(reply, payload_P=payload_Q)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkDownError("the training is over")

    def _next(self, kind: str, holder: int = 0) -> Message:
        """Wait for the next message of a holder while the server is connected."""
        reached_s = time.monotonic()
        while True:
            self._check_open()
            try:
                message = self._mail.get(holder, _LOOK_S)
            except queue.Empty:
                now_s = time.monotonic()
                if self._link.is_connected:
                    reached_s = now_s
                elif now_s - reached_s > self._wait_s:
                    raise ServerLostError(
                        f"the server has been unreachable for wait_s = {self._wait_s:g} s"
                    ) from None
                continue
            _check_refused(message)
            if message.kind != kind:
                raise JoinRefusedError(f"the server sent '{message.kind}' instead of '{kind}'")
            return message


def _digests(same: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256 of values by name.

    Raises:
        ConfigError: a value is neither plain nor bytes.
    """
    found = {}
    for name, value in same.items():
        try:
            data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"same['{name}']: a {type(value).__name__} has no digest: {error}",
                fix="Pass plain values or bytes, such as `tokenizer.get_vocab()`.",
            ) from None
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def _sums(
    where: str, sums: Mapping[object, object], rows: object
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of an evaluation as vectors.

    Raises:
        LoopMisuseError: names the argument that is wrong.
    """
    example = 'for example {"loss": loss * len(x)}, rows=len(x)'
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 0:
        raise LoopMisuseError(
            f"{where}: rows is {rows!r} ({type(rows).__name__}), not a number of rows",
            fix=f"Pass the number of this process's held-out rows, {example}.",
        )
    if not isinstance(sums, Mapping) or not sums:
        raise LoopMisuseError(
            f"{where}: sums is {'empty' if sums == {} else f'a {type(sums).__name__}, not a dict'}",
            fix=f"Pass sums by name, {example}.",
        )
    found = {}
    for name, value in sums.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            is_vector = isinstance(value, np.ndarray) and value.ndim <= 1
            own = value if is_vector else float(cast(float, value))
            found[name] = np.asarray(own, np.float64).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            raise LoopMisuseError(
                f"{where}: '{name}' is a {type(value).__name__}, not a number",
                fix=f"Pass the sum over the rows as a number or a tensor with one, {example}.",
            ) from None
    return found


class JoinedTraining:
    """A training of one model in a run; see `JoinedRegion.training`.

    It is a `torch.distributed.checkpoint.stateful.Stateful` for a user's own checkpoints.

    Attributes:
        done: whether the loop must end: the run is over, or was stopped.
        stopped: whether the run was stopped at a checkpoint, from which it can be resumed.
    """

    def __init__(
        self,
        exchange: RankExchange,
        exchanger: _Exchanger,
        ranks: _Ranks,
        loop: LoopState,
        saver: RankSaver | None,
        cutter: _Cutter,
        run_id: str,
    ) -> None:
        self._exchange, self._exchanger, self._ranks = exchange, exchanger, ranks
        self._run_id = run_id
        self._loop, self._saver, self._cutter = loop, saver, cutter
        self._losses: list[Tensor | float] = []
        self._calls = 0
        self._reported: tuple[int, bool] | None = None
        self._began_s = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the loop must end: the run is over, or was stopped."""
        return self._exchange.is_done

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped at a checkpoint, from which it can be resumed."""
        return self._exchange.is_halted

    @property
    def steps(self) -> int:
        """Steps so far that count for the run."""
        return self._exchange.version

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of a region in the whole run; None: the run ends by rows.

        A region that joins again, or in a resumed run, has made `total_steps` - `remaining_steps`
        of them: a new learning-rate schedule over all steps begins there.
        """
        steps = self._exchange.plan.steps
        return None if steps is None else steps * self._exchange.local_steps

    @property
    def remaining_steps(self) -> int | None:
        """Those of `total_steps` that this loop has still to make."""
        steps = self._exchange.plan.steps
        return None if steps is None else (steps - self.steps) * self._exchange.local_steps

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Repeat a data loader until the run is over.

        Before each pass over the data, ``loader.sampler.set_epoch`` gets the number of the pass, if
        there is such a method.

        Raises:
            LoopMisuseError: the loader is empty, or `step` is never called.
        """
        epoch = unused = 0
        while not self.done:
            sampler = getattr(loader, "sampler", None)
            for each in (sampler, loader):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
                    break
            is_empty = True
            for batch in loader:
                is_empty, before = False, self._calls
                yield batch
                if self._exchange.is_done:
                    return
                unused = unused + 1 if self._calls == before else 0
            if is_empty:
                raise LoopMisuseError(f"the data loader of region '{self._ranks.region}' is empty")
            if unused > _MOST_UNUSED:
                raise LoopMisuseError(
                    f"region '{self._ranks.region}' used {unused} batches without a call of "
                    "`sync.step`",
                    fix="Call `sync.step(rows=..., loss=...)` after every optimizer step.",
                )
            epoch += 1

    def step(self, rows: int, loss: Tensor | float | None = None) -> None:
        """Count an optimizer step; exchange and merge if that is due.

        All ranks of the region call it after every optimizer step.

        Args:
            rows: rows of this rank in the step.
            loss: its training loss; a tensor is read only at exchanges.

        Raises:
            LoopMisuseError: the run is over.
            RanksDisagreeError: other ranks have made other steps.
            ServerLostError: the server could not be reached for too long.
            NonFiniteError: the parameters are not finite.
            GeoRayError: the server has refused the update for another reason.
        """
        self._calls += 1
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        now_s = time.monotonic()
        self._settle(self._exchange.step(rows, now_s - self._began_s))
        self._began_s = time.monotonic()

    def settle(self) -> None:
        """Do what is due before the first step: a joining region may begin at the end of a run."""
        self._settle(self._exchange.advance())

    def _settle(self, sent: list[SendUpdate]) -> None:
        """Send updates, and merge their answers as far as they are there or must be awaited."""
        while True:
            while sent:  # no reference to a payload is kept here
                self._exchanger.send(self._with_loss(sent.pop(0).update))
            if not self._exchange.link_busy:
                break
            is_here = self._exchanger.arrived()
            if not self._exchange.waits and not self._ranks.all_true(is_here):
                break
            replies, took_s = self._exchanger.take()
            self._exchange.on_replies(replies, took_s)
            if (cuts := self._exchanger.cuts()) is not None:
                self._exchange.slices = self._cutter.slices(cuts, self._exchange.slices)
            if self._exchange.is_donor:
                self._exchanger.send_copies()
            checkpoint = self._exchanger.saves()
            if checkpoint is not None:
                self._save(checkpoint)
            if self._exchanger.halts:
                self._exchange.halt()
            sent = self._exchange.advance()

    def end(self, vector: ParameterVector, buffers: ModuleBuffers | None) -> None:
        """Tell the server that this rank has finished; send the model and save if it asks.

        Returns when the server has what it needs.
        """
        self._exchanger.tell(Message("finished", {}, b"", "control", CONTROL))
        while (message := self._exchanger.receive_end()).kind != "over":
            if message.kind == "save":
                self._save(fields.count(message.meta, "save"))
            else:
                self._exchanger.send_model(vector, buffers)

    def _save(self, checkpoint: int) -> None:
        """Copy the state at a barrier, to be written."""
        saver = self._saver
        if saver is None:
            return
        exchange = self._exchange
        ranges = [each.ranges for each in exchange.slices] or [()]
        states = exchange.copies(whole=True)
        saver.save(checkpoint, list(zip(ranges, states, strict=True)), self._loop)

    @property
    def evaluation_due(self) -> bool:
        """Whether to evaluate now: every `train.eval_every` steps, and at the end of the run.

        It is true in all ranks at the same steps, until `report` is called.
        """
        every = self._exchange.eval_every
        at = (self.steps, self._is_last)
        is_time = self._is_last or (every > 0 and self.steps > 0 and self.steps % every == 0)
        return is_time and at != self._reported

    @property
    def _is_last(self) -> bool:
        """Whether the run has ended, and was not stopped."""
        return self.done and not self.stopped

    def report(self, sums: Mapping[str, Tensor | NDArray[np.float64] | float], rows: int) -> None:
        """Report an evaluation; the metric of the run is the sum over all ranks by all rows.

        Args:
            sums: sums over this rank's held-out rows by name, such as the loss times the rows;
                vectors for a task.
            rows: this rank's held-out rows.

        Raises:
            LoopMisuseError: no evaluation is due, this one was reported already, or a value is not
                what it must be.
        """
        where = f"region '{self._ranks.region}': sync.report after {self.steps} steps"
        if not self.evaluation_due:
            is_second = self._reported == (self.steps, self._is_last)
            raise LoopMisuseError(
                f"{where}: {'the second report' if is_second else 'no evaluation is due'}",
                fix="Report all sums in one call."
                if is_second
                else "Evaluate and report `if sync.evaluation_due`, see `train.eval_every`.",
            )
        stats = _sums(where, cast(Mapping[object, object], sums), rows)
        self._reported = (self.steps, self._is_last)
        meta, payload = stats_message(self.steps, stats, int(rows), final=self._is_last)
        self._exchanger.tell(Message("evaluation", meta, bytes(payload), "control"))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state in the run, for `torch.distributed.checkpoint.save`.

        It has the parameters in fp32, the strategy's state, coding errors and counters, and a round
        that has begun. The averager's state is part of the run's checkpoints only. Every rank saves
        its own state, next to the model and the optimizer::

            dcp.save({"model": ..., "optimizer": ..., "sync": sync}, storage_writer=...)
        """
        state = self._exchange.export()
        about = {
            "run": self._run_id,
            "region": self._ranks.region,
            "reported": self._reported,
            "losses": [float(each) for each in self._losses],
        }
        # In a tuple: torch cannot load tensors that do not exist yet, as in a training that begins.
        return {self._own_key: (dict(state.tensors), {**state.control, **about})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; the loop continues exactly from there.

        The averager keeps its state. So the state must have been saved since the region's last
        exchange: in this training, or, in a run that was resumed, in the round after its
        checkpoint. Every rank loads its own.

        Raises:
            CheckpointMismatchError: the state is of another run, region, rank or round, or of
                another sharding. Nothing has changed then.
        """
        saved = state_dict.get(self._own_key)
        if not isinstance(saved, tuple) or len(saved) != 2:
            raise CheckpointMismatchError(
                f"the state of `sync` has no '{self._own_key}'",
                fix="Load it with the number of ranks that saved it, or load without `sync`.",
            )
        tensors, control = saved
        mine, theirs = (self._run_id, self._ranks.region), (control["run"], control["region"])
        if mine != theirs:
            raise CheckpointMismatchError(
                f"the state of `sync` is of region '{theirs[1]}' in run '{theirs[0]}', not of "
                f"'{mine[1]}' in '{mine[0]}'",
                fix="Load the region's own state of this run, or load without `sync`.",
            )
        self._exchange.restore_export(RankState(tensors, control))
        self._losses = list(control["losses"])
        reported = control["reported"]
        self._reported = None if reported is None else (reported[0], reported[1])

    @property
    def _own_key(self) -> str:
        return f"rank-{self._ranks.rank:05d}"

    def _with_loss(self, update: UpdateMessage) -> UpdateMessage:
        """Return the update with the mean loss since the last one."""
        losses, self._losses = self._losses, []
        if not losses:
            return update
        mean = sum(float(each) for each in losses) / len(losses)
        return replace(update, loss=mean)

    def check_ended(self) -> None:
        """Refuse a loop that ended before the run."""
        if not self.done:
            plan = self._exchange.plan
            raise LoopMisuseError(
                f"the loop of region '{plan.region}' ended after {self.steps} of {plan.steps} "
                "steps",
                fix="Loop over `sync.batches(loader)`, or until `sync.done`.",
            )
