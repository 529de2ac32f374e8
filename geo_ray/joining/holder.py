"""Slices of a run that another process than the service holds.

`SliceHolder` is the state machine of such a process, `Holders` what the service knows of all of
them. A commit has two phases:

1. A rank sends the payload of a slice to its holder, which checks and stages it, and reports it to
   the service. Headers go to the service.
2. When all slices of a region's update are staged, the service orders all holders to take it in.
   Holders execute orders in the order of their numbers and report each. Answers leave when all
   holders have executed the order that has caused them.

If a holder is lost, the answers to everything that it has not executed are dropped with the run's
present state, and the run continues from its newest checkpoint. If the service is lost, its standby
(`geo_ray.joining.replication`) has the same orders and reports: messages between the service and
holders are numbered, so that the standby sends the orders that a holder lacks, and none twice.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from geo_ray.base.errors import FrameError, GeoRayError
from geo_ray.joining.numbering import copied
from geo_ray.joining.pieces import PIECE, SIZE, divided, size_of
from geo_ray.joining.protocol import (
    ADDRESSEE,
    SERVER,
    JoinTerms,
    Outbound,
    holder_name,
    process_words,
    rank_name,
    region_of,
)
from geo_ray.joining.regions import StagedPart
from geo_ray.joining.slices import (
    Answers,
    Order,
    SavedSlice,
    SliceAveragers,
    order_json,
    read_order,
)
from geo_ray.training.messages import UpdateMessage
from geo_ray.training.wire_format import read_update, refusal_meta, reply_meta
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

RANK_FIELDS: Final = ("rank_rows", "rank_loss", "slice", SIZE)
"""Fields of an update's message that describe its rank."""
_NUMBER: Final = "order"


def _control(kind: str, meta: Meta, payload: bytes = b"") -> Message:
    return Message(kind, meta, payload, "control", CONTROL)


def _refusal(peer: str, attempt: int, error: GeoRayError) -> Outbound:
    """Return the message to the service that a rank cannot continue."""
    own: Meta = {"peer": peer, "attempt": attempt}
    return Outbound(SERVER, _control("refused", {**refusal_meta(0, error), **own}))


def reply_bytes(answers: Answers) -> dict[str, int]:
    """Return the size of the answers to each region."""
    found: dict[str, int] = {}
    for of_slice in answers.values():
        for each in of_slice:
            found[each.to] = found.get(each.to, 0) + each.size_bytes
    return found


def read_sizes(message: Message) -> dict[str, int]:
    """Return the result of `reply_bytes` from the report of an executed order.

    Raises:
        FrameError: it cannot be read.
    """
    try:
        return {str(k): int(v) for k, v in json.loads(bytes(message.payload)).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"the report of a holder cannot be read: {error!r}") from None


def read_staged(message: Message) -> tuple[str, int, int, StagedPart]:
    """Return region, attempt, slice and part of the report that a part is staged.

    Raises:
        FrameError: it cannot be read.
    """
    meta = message.meta
    try:
        decided = dict(json.loads(bytes(message.payload)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"the report of a holder cannot be read: {error!r}") from None
    part = StagedPart(decided, fields.count(meta, "size"))
    index, attempt = fields.count(meta, "slice"), fields.count(meta, "attempt")
    return fields.text(meta, "region"), attempt, index, part


class Holders:
    """The other processes that hold slices, as the service knows them.

    Attributes:
        newest: number of the newest order.
        confirmed: number of the newest order that all holders have executed.
        is_stopped: whether a holder was lost.

    Args:
        count: number of processes that hold slices, the service's included.
    """

    def __init__(self, count: int) -> None:
        self.newest = self.confirmed = 0
        self.is_stopped = False
        self._addresses: dict[int, Address] = {}
        self._executed = dict.fromkeys(range(1, count), 0)
        self._orders: list[Outbound] = []  # that were not sent yet
        self._waiting: deque[tuple[int, list[Outbound]]] = deque()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses, from holder 1 on."""
        return tuple(self.address(holder) for holder in self._executed)

    def address(self, holder: int) -> Address:
        """The address of a holder that has connected."""
        return self._addresses[holder]

    @property
    def is_settled(self) -> bool:
        """Whether no message to a rank waits for a holder."""
        return not self._waiting

    def missing(self) -> dict[str, str]:
        """Return the holders that have not connected yet."""
        return {
            process_words(holder): "not there"
            for holder in self._executed
            if holder not in self._addresses
        }

    def is_known(self, holder: int) -> bool:
        """Return whether a holder has connected."""
        return holder in self._addresses

    def add(self, holder: int, address: Address) -> bool:
        """Record that a holder has connected; return False if it has before.

        Raises:
            FrameError: there is no such holder.
        """
        if holder not in self._executed:
            raise FrameError(f"there is no holder {holder}")
        if holder in self._addresses:
            return False
        self._addresses[holder] = address
        return True

    def order(self, order: Order) -> None:
        """Send an order to all holders with the next messages (`gated`)."""
        self.newest += 1
        message = _control("order", {_NUMBER: self.newest}, order_json(order))
        self._orders += [Outbound(holder_name(holder), message) for holder in self._executed]

    def on_executed(self, holder: int, number: int) -> None:
        """Record that a holder has executed an order.

        Raises:
            FrameError: it is not the next one.
        """
        if number != self._executed.get(holder, -1) + 1 or number > self.newest:
            raise FrameError(f"holder {holder} reports order {number} out of turn")
        self._executed[holder] = number

    def gated(self, found: list[Outbound]) -> list[Outbound]:
        """Return what may be sent: orders, and messages whose orders all holders have executed.

        Args:
            found: new messages to ranks, which wait for everything that was ordered before.
        """
        if self.is_stopped:
            return found
        may, self._orders = self._orders, []
        if found:
            self._waiting.append((self.newest, found))
        least = min(self._executed.values(), default=self.newest)
        if least > self.confirmed:
            self.confirmed = least
            release = _control("release", {_NUMBER: least})
            may += [Outbound(holder_name(holder), release) for holder in self._executed]
        while self._waiting and self._waiting[0][0] <= least:
            may += self._waiting.popleft()[1]
        return may

    def copy_payloads(self) -> None:
        """Replace payloads of messages that wait, which may be views of memory, by bytes."""
        self._waiting = deque(
            (number, [Outbound(each.peer, copied(each.message)) for each in found])
            for number, found in self._waiting
        )

    def stop(self) -> None:
        """Drop everything that waits: a holder is lost."""
        self.is_stopped = True
        self._orders, self._waiting = [], deque()


class SliceHolder:
    """The state machine of a process that holds slices, but not the service.

    Calls are messages of the service and of ranks, and return messages for them.

    Attributes:
        averagers: the averagers of its slices.

    Args:
        terms: the run.
        holder: its number.
        saved: slices of a checkpoint that the run continues from; see `SliceAveragers`.
    """

    def __init__(self, terms: JoinTerms, holder: int, saved: Sequence[SavedSlice] = ()) -> None:
        self.averagers = SliceAveragers(terms, holder, saved)
        self._executed = 0
        self._held: deque[tuple[int, list[Outbound]]] = deque()  # answers by order
        self._is_broken = False

    def on_message(self, peer: str, message: Message) -> list[Outbound]:
        """Handle a message.

        Args:
            peer: name of the endpoint, which the transport has verified.
            message: the message.
        """
        if peer == SERVER:
            return self._on_service(message)
        try:
            return self._on_rank(peer, message)
        except GeoRayError as error:
            attempt = message.meta.get("attempt")
            return [_refusal(peer, attempt if isinstance(attempt, int) else 0, error)]

    def _on_service(self, message: Message) -> list[Outbound]:
        if self._is_broken:
            return []
        try:
            number = fields.count(message.meta, _NUMBER)
            if message.kind == "release":
                return self._released(number)
            if message.kind != "order" or number != self._executed + 1:
                raise FrameError(f"'{message.kind}' {number} after order {self._executed}")
            answers = self.averagers.execute(read_order(bytes(message.payload)))
        except GeoRayError as error:
            log.exception("an order failed")
            self._is_broken = True
            return [Outbound(SERVER, _control("broken", refusal_meta(0, error)))]
        self._executed = number
        self._held.append((number, self._messages(answers)))
        sizes = json.dumps(reply_bytes(answers)).encode()
        return [Outbound(SERVER, _control("executed", {_NUMBER: number}, sizes))]

    def _released(self, number: int) -> list[Outbound]:
        found: list[Outbound] = []
        while self._held and self._held[0][0] <= number:
            found += self._held.popleft()[1]
        return found

    def _messages(self, answers: Answers) -> list[Outbound]:
        """Return the answers for the ranks that own the slices."""
        found = []
        for index, of_slice in answers.items():
            for reply in of_slice:
                rank = self.averagers.slices[index].owners[reply.to]
                meta = {**reply_meta(reply), "slice": index}
                owner = rank_name(reply.to, rank)
                found += [Outbound(owner, each) for each in divided(meta, reply)]
        return self._addressed(found)

    def _addressed(self, found: Sequence[Outbound]) -> list[Outbound]:
        """Return messages with the attempts that they are for."""
        attempts: Mapping[str, int] = self.averagers.attempts
        return [
            Outbound(
                each.peer,
                replace(
                    each.message,
                    meta={**each.message.meta, ADDRESSEE: attempts[region_of(each.peer)]},
                ),
            )
            for each in found
        ]

    def _on_rank(self, peer: str, message: Message) -> list[Outbound]:
        meta = message.meta
        if message.kind == "update":
            index = fields.count(meta, "slice")
            own = {k: v for k, v in meta.items() if k not in RANK_FIELDS}
            update = read_update(own, message.payload)
            size = size_of(message)
            if size is None:
                return [self._staged(peer, index, update)]
            self.averagers.begin_part(peer, index, update, meta, size)
            return []
        if message.kind == PIECE:
            arrived = self.averagers.add_piece(peer, message)
            if arrived is None:
                return []
            return [self._staged(peer, fields.count(arrived.meta, "slice"), arrived.update)]
        if message.kind == "state":
            found = self.averagers.on_state(peer, message)
            if found is None:
                return []
            index, shared, is_complete = found
            here = [Outbound(SERVER, _control("arrived", {"slice": index}))]
            return self._addressed(shared) + (here if is_complete else [])
        if message.kind == "copy":
            relayed = self.averagers.on_copy(peer, message)
            if relayed is None:
                return []
            version = int(str(relayed.state.control["version"]))
            about: Meta = {"slice": relayed.index, "size": relayed.size_bytes, "version": version}
            copied = Outbound(SERVER, _control("copied", about))
            return [*self._addressed(relayed.messages), copied]
        raise FrameError(f"unknown message '{message.kind}'")

    def _staged(self, peer: str, index: int, update: UpdateMessage) -> Outbound:
        """Stage the update of a slice, and report it."""
        self.averagers.stage(peer, index, update)
        part = StagedPart.of(update)
        about: Meta = {
            "region": update.region,
            "attempt": update.attempt,
            "slice": index,
            "size": part.size_bytes,
        }
        decided = json.dumps(dict(part.decided)).encode()
        return Outbound(SERVER, _control("staged", about, decided))
