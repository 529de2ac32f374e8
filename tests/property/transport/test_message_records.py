"""Every record of a message survives the wire, a changed header is refused by name or means itself.

The headers in `OLD` were written by hand-written code, before records had tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import FrameError, LinkDownError
from geo_ray.base.types import CodedPartition, Span, StepReport
from geo_ray.codecs.base import Coded, LossyBlocks, LossyReport, pack_ranks
from geo_ray.runtime.exchange import standby, upload_scheduling
from geo_ray.training import wire_format as exchange
from geo_ray.training.command_log import BeginCheckpoint, LogEntry, Skip, Stop, TakeIn, TakeSum
from geo_ray.training.effects import Assignment
from geo_ray.training.failover import (
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    LogAck,
    LogAppend,
    NewAverager,
)
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.shard import Contribution
from geo_ray.transport.overlay import messages as overlay
from geo_ray.transport.overlay import messages as wire
from geo_ray.transport.overlay.plan import SendOrder
from geo_ray.transport.uploads import Gather, UploadRequest
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta
from geo_ray.transport.wire.message import BACKGROUND, Message

COUNT, FLAG, TEXT = st.integers(0, 2**63 - 1), st.booleans(), st.text(max_size=5)
NUMBER = st.floats(allow_nan=False)
AMOUNT = st.floats(0, allow_infinity=False)
BYTES = st.binary(max_size=6)
MASK, REGION = st.integers(0, 2**62 - 1), st.integers(0, 2)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def tensors(dtype: torch.dtype, most: int) -> st.SearchStrategy[torch.Tensor]:
    values = st.lists(st.integers(0, 200), max_size=most)
    return values.map(lambda found: torch.tensor(found, dtype=dtype))


VECTOR = tensors(torch.float32, 4)


@st.composite
def lossy_blocks(draw: Any) -> LossyBlocks:
    num, size = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    ids_L = torch.arange(num, dtype=torch.int32)
    blocks_LK = torch.arange(num * size, dtype=torch.uint8).view(num, size)
    return LossyBlocks(ids_L, blocks_LK, draw(st.integers(1, 4)))


CODED = st.builds(Coded, TEXT, COUNT, tensors(torch.uint8, 5), maybe(lossy_blocks()))
REPORT = st.builds(LossyReport, BYTES, maybe(COUNT), BYTES)


@st.composite
def updates(draw: Any) -> UpdateMessage:
    coded = draw(maybe(CODED))
    return UpdateMessage(
        *(draw(TEXT), *(draw(COUNT) for _ in range(4))),
        payload_P=torch.empty(0) if coded else draw(VECTOR),
        final=draw(FLAG),
        fragment=draw(COUNT),
        coded=coded,
        against=draw(maybe(COUNT)),
        steps=draw(COUNT),
        step_s=draw(NUMBER),
        exchange_s=draw(NUMBER),
        grad_sq=draw(maybe(NUMBER)),
    )


@st.composite
def replies(draw: Any) -> ReplyMessage:
    coded = draw(maybe(CODED))
    return ReplyMessage(
        *(draw(TEXT), *(draw(COUNT) for _ in range(3))),
        payload_P=torch.empty(0) if coded else draw(VECTOR),
        final=draw(FLAG),
        stop=draw(FLAG),
        checkpoint=draw(maybe(COUNT)),
        halt=draw(FLAG),
        coded=coded,
        against=draw(maybe(COUNT)),
        dropped=draw(FLAG),
        own=draw(FLAG),
        lossy=draw(maybe(REPORT)),
        fragment=draw(COUNT),
        own_weight=draw(NUMBER),
        steps=draw(maybe(COUNT)),
        seen=draw(COUNT),
        reliable=draw(maybe(NUMBER)),
        held_s=draw(NUMBER),
        draining=draw(st.booleans()),
        next_fragment=draw(COUNT),
    )


UPDATES, REPLIES = updates(), replies()
SPAN = st.builds(Span, COUNT, COUNT)
SHARES = st.lists(st.builds(CodedPartition, SPAN, NUMBER), max_size=3).map(tuple)
WORK = st.builds(Assignment, st.just(1), COUNT, maybe(SPAN), FLAG, FLAG, FLAG, SHARES)
STEP = st.builds(StepReport, SPAN, maybe(NUMBER), NUMBER, maybe(TEXT), maybe(NUMBER))
UNUSED = st.lists(COUNT, max_size=3).map(tuple)
REPORTS = st.tuples(STEP, maybe(NUMBER), maybe(NUMBER)).flatmap(
    lambda drawn: st.tuples(
        st.just(drawn[0]),
        st.lists(
            st.builds(
                StepReport,
                SPAN,
                NUMBER,
                NUMBER,
                st.none(),
                st.just(drawn[1]),
                st.just(drawn[2]),
                UNUSED,
            ),
            max_size=3,
        ),
    )
)
"""A worker's newest report, and earlier ones."""
CONTRIBUTIONS = st.one_of(
    st.lists(st.builds(Contribution, COUNT, COUNT, weight), max_size=3).map(tuple)
    for weight in (st.none(), NUMBER)
)
ERROR = st.builds(LinkDownError, TEXT, fix=st.text(min_size=1, max_size=5))
SIZE = st.integers(0, upload_scheduling.MOST_BYTES)
ASK = st.builds(UploadRequest, st.just("eu"), COUNT, COUNT, SIZE, COUNT, AMOUNT, FLAG, FLAG)


@st.composite
def sums(draw: Any, sizes: st.SearchStrategy[int] = SIZE) -> tuple[UploadRequest, ...]:
    size = draw(sizes)
    regions = draw(st.lists(TEXT, min_size=1, max_size=3, unique=True))
    return tuple(UploadRequest(r, draw(COUNT), draw(COUNT), size, draw(COUNT)) for r in regions)


@st.composite
def bundles(draw: Any) -> tuple[ReplyMessage, ...]:
    named = draw(st.lists(st.tuples(TEXT, COUNT), min_size=1, max_size=3))
    head = draw(st.fixed_dictionaries({"stop": FLAG, "checkpoint": maybe(COUNT), "halt": FLAG}))
    version, payload_P = draw(COUNT), torch.ones(1)
    return tuple(
        ReplyMessage(to, seq, version, 0, payload_P, own=True, **head) for to, seq in named
    )


SKIP = st.builds(Skip, st.just("eu"), COUNT, COUNT)
SUM = st.builds(TakeSum, sums(st.just(0)).map(upload_scheduling.headers_of), VECTOR)
OPS = st.one_of(
    st.builds(TakeIn, UPDATES), SUM, SKIP, st.just(Stop()), st.builds(BeginCheckpoint, COUNT, FLAG)
)
STANDBY = st.one_of(
    st.builds(AveragerRequest, st.builds(TakeIn, UPDATES), FLAG),
    st.builds(AveragerRequest, SKIP, st.just(True)),
    st.builds(AveragerAnswer, COUNT, REPLIES, COUNT, COUNT),
    st.builds(AveragerRefusal, COUNT, COUNT, ERROR),
    st.builds(LogAppend, COUNT, st.builds(LogEntry, COUNT, OPS)),
    st.builds(LogAck, COUNT, COUNT),
    st.builds(AveragerLost, COUNT, FLAG),
    st.builds(NewAverager, COUNT, st.tuples(COUNT, COUNT)),
)


@st.composite
def orders(draw: Any, src: int) -> SendOrder:
    first = draw(st.integers(0, 2**62))
    stop = draw(st.integers(first + 1, 2**63 - 1))
    return SendOrder(src, draw(REGION), draw(st.integers(0, 2)), first, stop, draw(MASK))


ABOUT = st.dictionaries(TEXT, st.one_of(maybe(COUNT), FLAG, NUMBER, TEXT, st.lists(COUNT)))
RANGES = st.lists(st.tuples(COUNT, COUNT), max_size=3).map(tuple)
OVERLAY = st.one_of(
    st.builds(overlay.Ready, COUNT, ABOUT),
    st.builds(overlay.Orders, COUNT, COUNT, st.lists(orders(2), max_size=3).map(tuple)),
    st.builds(overlay.SegmentAck, COUNT),
    st.builds(overlay.Sent, COUNT, COUNT, orders(1), COUNT, AMOUNT, FLAG),
    st.builds(overlay.Whole, COUNT),
    st.builds(overlay.Stuck, COUNT, REGION),
    st.builds(overlay.Starved, COUNT),
    st.builds(overlay.Fetch, COUNT, REGION),
    st.builds(overlay.Want, COUNT, RANGES),
    st.builds(overlay.Commit, COUNT, COUNT, ABOUT),
)
PHASE = st.integers(0, 1)
PART = st.builds(
    overlay.SegmentPart, COUNT, COUNT, PHASE, COUNT, MASK, AMOUNT, FLAG, BYTES, acked=COUNT
)

Written = tuple[str, Meta, bytes]


@dataclass(frozen=True)
class Case:
    """How values of a kind are made, written and read."""

    values: st.SearchStrategy[Any]
    write: Callable[[Any], Written]
    read: Callable[[Written], Any]


def headers(write: Callable[[Any], Meta], read: Callable[[Meta], Any]) -> Any:
    return (lambda value: ("", write(value), b"")), (lambda written: read(written[1]))


def with_payload(write: Callable[[Any], Meta], read: Callable[..., Any]) -> Any:
    return (
        lambda value: ("", write(value), bytes(exchange.payload_bytes(value))),
        lambda written: read(written[1], written[2]),
    )


def messages(write: Callable[[Any], Message], read: Callable[[Message], Any]) -> Any:
    def written(value: Any) -> Written:
        message = write(value)
        return message.kind, message.meta, bytes(message.payload)

    return written, lambda written: read(Message(*written, "x"))


def nowhere(attempt: int, seq: int) -> None:
    return None


CASES = {
    "update": Case(UPDATES, *with_payload(exchange.update_meta, exchange.read_update)),
    "reply": Case(REPLIES, *with_payload(exchange.reply_meta, exchange.read_reply)),
    "work": Case(WORK, *headers(exchange.answer_meta, lambda m: exchange.read_answer(1, m))),
    "reports": Case(
        REPORTS,
        *headers(
            lambda v: exchange.report_meta(*v),
            lambda m: ((found := exchange.read_reports(m))[-1], found[:-1]),
        ),
    ),
    "contributions": Case(
        CONTRIBUTIONS, *headers(exchange.contributions_meta, exchange.read_contributions)
    ),
    "refusal": Case(
        st.tuples(COUNT, ERROR),
        *headers(lambda v: exchange.refusal_meta(*v), exchange.read_refusal),
    ),
    "ask": Case(
        st.tuples(ASK, FLAG),
        *headers(
            lambda v: upload_scheduling.ask_meta(v[0], sent=v[1]),
            lambda m: upload_scheduling.read_ask("eu", m),
        ),
    ),
    "sum": Case(
        st.builds(upload_scheduling.Summed, COUNT, sums()),
        *headers(upload_scheduling.SUM.write, upload_scheduling.SUM.read),
    ),
    "gather": Case(
        st.builds(Gather, COUNT, TEXT, sums()),
        *headers(upload_scheduling.GATHER.write, upload_scheduling.GATHER.read),
    ),
    "bundle": Case(
        bundles(),
        *headers(
            upload_scheduling.bundle_meta, lambda m: upload_scheduling.read_bundle(m, torch.ones(1))
        ),
    ),
    "standby": Case(
        STANDBY,
        *messages(
            lambda v: standby.standby_message("us", v, BACKGROUND, bare=True),
            lambda m: standby.read_standby("eu", m, nowhere),
        ),
    ),
    "overlay": Case(
        OVERLAY,
        *messages(wire.control_message, lambda m: wire.read_control(m, 1, 2, num_regions=3)),
    ),
    "part": Case(PART, *messages(wire.part_message, wire.read_part)),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# Fields that are read together: an error may name another one of them.
TOGETHER = [
    {"coded", "num", "data_bytes", "loose_blocks", "loose_block_bytes", "loose_bands"},
    {"loose_now", "loose_late_seq", "loose_late"},
    {"first", "stop"},
    {"start", "count"},
    {"earlier_unused", "earlier_num_unused"},
]
# Read by the receiver beforehand; of any release; a norm that cannot be is 0, an empty fix general.
TAKEN_AS_THEY_ARE = {"op", "code", "norm", "fix"}
TAGS = {"word", "what"}  # with another one, other fields are missing
OTHERS = st.one_of(
    st.none(),
    FLAG,
    st.integers(-(2**63), 2**64 - 1),
    NUMBER,
    TEXT,
    BYTES,
    st.sampled_from(["sum", "skip", "yours", "Whole", "Stuck"]),
    st.lists(st.integers(-1, 5), max_size=3),
    st.lists(maybe(TEXT), max_size=3),
)


def carried(written: Written) -> Written:
    kind, meta, payload = written
    return kind, decode_meta(encode_meta(meta)), payload


@EACH
@given(data=st.data())
def test_values_are_read_as_written(case: Case, data: Any) -> None:
    value = data.draw(case.values)
    written = carried(case.write(value))
    found = case.read(written)
    again = case.write(found)
    assert again == written
    assert list(again[1]) == list(written[1])


@EACH
@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_header_is_refused_by_name_or_valid(case: Case, data: Any) -> None:
    kind, meta, payload = carried(case.write(data.draw(case.values)))
    fields = sorted(name for name in meta if name not in TAKEN_AS_THEY_ARE and name[:2] != "a.")
    if not fields:
        return
    name = data.draw(st.sampled_from(fields))
    changed = {key: value for key, value in meta.items() if key != name}
    if data.draw(FLAG):
        changed = meta | {name: data.draw(OTHERS)}
    try:
        found = case.read((kind, changed, payload))
    except FrameError as error:
        names = set().union({name}, *(group for group in TOGETHER if name in group))
        told = any(f"'{one}'" in error.message for one in names)
        assert told or name in TAGS or "no longer here" in error.message, error.message
        return
    again = case.write(found)[1]
    if isinstance(again.get(name), float):  # an int counts as a number
        changed[name] = float(changed[name])
    assert again == {key: changed[key] for key in again}


OLD_BLOCKS = torch.arange(10, dtype=torch.uint8).reshape(2, 5)
OLD_LOSSY = LossyBlocks(torch.tensor([4, 1], dtype=torch.int32), OLD_BLOCKS, 2)
OLD_CODED = Coded("dgt", 40, torch.arange(11, dtype=torch.uint8), OLD_LOSSY)
OLD_REPORT = LossyReport(pack_ranks([0, 3, 9]), 4, pack_ranks([1]))
OLD_PART = UpdateMessage("b", 1, 3, 5, 0, torch.empty(0))
OLD: list[tuple[str, Any, bytes]] = [
    (
        "update",
        UpdateMessage(
            "eu",
            1,
            2,
            3,
            4,
            torch.ones(2),
            final=True,
            fragment=3,
            steps=6,
            step_s=0.25,
            exchange_s=1.5,
            grad_sq=2.75,
        ),
        b"\x8d\xa6region\xa2eu\xa7attempt\x01\xa3seq\x02\xacbase_version\x03"
        b"\xabnum_samples\x04\xa5final\xc3\xa8fragment\x03\xa5steps\x06\xa6st"
        b"ep_s\xcb?\xd0\x00\x00\x00\x00\x00\x00\xaaexchange_s\xcb?\xf8\x00"
        b"\x00\x00\x00\x00\x00\xa7grad_sq\xcb@\x06\x00\x00\x00\x00\x00\x00"
        b"\xa5coded\xc0\xa7against\xc0",
    ),
    (
        "update",
        UpdateMessage("eu", 1, 2, 3, 4, torch.empty(0), coded=OLD_CODED),
        b"\xde\x00\x12\xa6region\xa2eu\xa7attempt\x01\xa3seq\x02\xacbase_versio"
        b"n\x03\xabnum_samples\x04\xa5final\xc2\xa8fragment\x00\xa5steps\x00"
        b"\xa6step_s\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xaaexchange_s\xcb"
        b"\x00\x00\x00\x00\x00\x00\x00\x00\xa7grad_sq\xc0\xa5coded\xa3dgt\xa7"
        b"against\xc0\xa3num(\xaadata_bytes\x0b\xacloose_blocks\x02\xb1loose_"
        b"block_bytes\x05\xabloose_bands\x02",
    ),
    (
        "reply",
        ReplyMessage(
            *("eu", 2, 3, 4, torch.ones(2)),
            True,
            True,
            5,
            True,
            None,
            None,
            True,
            True,
            None,
            3,
            0.25,
            6,
            99,
            0.5,
            0.125,
        ),
        b"\xde\x00\x12\xa2to\xa2eu\xa3seq\x02\xa7versi"
        b"on\x03\xabnum_samples\x04\xa5fin"
        b"al\xc3\xa4stop\xc3\xaacheckpoint"
        b"\x05\xa4halt\xc3\xa7skipped\xc3\xa3own"
        b"\xc3\xa8fragment\x03\xaaown_weig"
        b"ht\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa5steps\x06\xa6h"
        b"eld_s\xcb?\xc0\x00\x00\x00\x00\x00\x00\xa4seenc"
        b"\xa8reliable\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa5c"
        b"oded\xc0\xa7against\xc0",
    ),
    (
        "reply",
        ReplyMessage("eu", 2, 3, 4, torch.ones(1), lossy=OLD_REPORT),
        b"\xde\x00\x15\xa2to\xa2eu\xa3seq\x02\xa7versi"
        b"on\x03\xabnum_samples\x04\xa5fin"
        b"al\xc2\xa4stop\xc2\xaacheckpoint"
        b"\xc0\xa4halt\xc2\xa7skipped\xc2\xa3own"
        b"\xc2\xa8fragment\x00\xaaown_weig"
        b"ht\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa5steps\xc0\xa6h"
        b"eld_s\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa4seen\x00"
        b"\xa8reliable\xc0\xa9loose_now"
        b"\xc4\nx\x9c\x9b\xe0\x00\x00\x01b\x00\xd1\xaeloose_l"
        b"ate_seq\x04\xaaloose_late\xc4"
        b"\tx\x9cs\x00\x00\x00A\x00A\xa5coded\xc0\xa7ag"
        b"ainst\xc0",
    ),
    (
        "work",
        Assignment(1, 7, None, evaluate=True, done=True),
        b"\x89\xa7version\x07\xa5start\xc0\xa5count\xc0\xa8evaluate\xc3\xa6ju"
        b"dged\xc2\xabpart_starts\x90\xabpart_counts\x90\xacpart_weights\x90"
        b"\xa4done\xc3",
    ),
    (
        "ask",
        (UploadRequest("eu", 1, 3, 100, 5, 2.5, True, True), True),
        b"\x88\xa7attempt\x01\xa3seq\x03\xaasize_bytesd\xacbase_version\x05\xa4"
        b"norm\xcb@\x04\x00\x00\x00\x00\x00\x00\xa5final\xc3\xa5again\xc3\xa4"
        b"sent\xc3",
    ),
    (
        "standby",
        LogAppend(3, LogEntry(12, TakeSum((OLD_PART,), torch.tensor([4.0, 4.5])))),
        b"\x88\xableader_term\x03\xa6number\x0c\xa4what\xa3sum\xa7regions\x91"
        b"\xa1b\xa8attempts\x91\x01\xa4seqs\x91\x03\xadbase_versions\x91\x05"
        b"\xaasize_bytes\x00",
    ),
    (
        "standby",
        LogAppend(3, LogEntry(12, Stop())),
        b"\x83\xableader_term\x03\xa6number\x0c\xa4what\xa4stop",
    ),
    (
        "standby",
        NewAverager(4, (2, 7)),
        b"\x83\xableader_term\x04\xaclast_attempt\x02\xa8last_seq\x07",
    ),
    (
        "overlay",
        overlay.SegmentAck(17),
        b"\x82\xa4word\xa3Ack\xa5count\x11",
    ),
    (
        "overlay",
        overlay.Sent(3, 1, SendOrder(1, 1, 0, 0, 4, 5), 1000, 0.25, True),
        b"\x8b\xa4word\xa4Sent\xa3rnd\x03\xa7attempt\x01\xa3dst\x91\x01\xa5ph"
        b"ase\x91\x00\xa5first\x91\x00\xa4stop\x91\x04\xa4need\x91\x05\xa5byt"
        b"es\xcd\x03\xe8\xa6busy_s\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa7starve"
        b"d\xc3",
    ),
    (
        "overlay",
        overlay.Want(3, ((0, 4), (7, 9))),
        b"\x84\xa4word\xa4Want\xa3rnd\x03\xa5first\x92\x00\x07\xa4stop\x92\x04\t",
    ),
    (
        "overlay",
        overlay.Commit(3, 1, {"region": "eu", "seq": 3}),
        b"\x85\xa4word\xa6Commit\xa3rnd\x03\xa8a.region\xa2eu\xa5a.seq\x03\xa7attempt\x01",
    ),
    (
        "part",
        overlay.SegmentPart(3, 1, 0, 5, 6, 2.5, True, b"12345678", 4),
        b"\x88\xa3rnd\x03\xa7attempt\x01\xa5phase\x00\xa5index\x05\xa4mask"
        b"\x06\xa6weight\xcb@\x04\x00\x00\x00\x00\x00\x00\xa3ack\xc3\xa5acked"
        b"\x04",
    ),
]


@pytest.mark.parametrize(("name", "value", "old"), OLD, ids=[case[0] for case in OLD])
def test_headers_are_unchanged_by_the_tables(name: str, value: Any, old: bytes) -> None:
    case = CASES[name]
    kind, meta, payload = case.write(value)
    assert encode_meta(meta) == old
    assert case.write(case.read((kind, decode_meta(old), payload))) == (kind, meta, payload)
