"""Words of an averager that may move, and of transfers, survive the wire; nonsense is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import FrameError, LinkDownError
from geo_ray.runtime.exchange.standby import KINDS, read_standby, standby_message
from geo_ray.runtime.exchange.upload_scheduling import (
    PARTS,
    ask_meta,
    bundle_meta,
    can_bundle,
    headers_of,
    read_ask,
    read_bundle,
)
from geo_ray.training.command_log import (
    BeginCheckpoint,
    Begun,
    ChangeInterval,
    ChangeMembers,
    Leave,
    LogEntry,
    Promote,
    Skip,
    StateSnapshot,
    Stop,
    TakeIn,
    TakeSum,
    Wake,
)
from geo_ray.training.failover import (
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    InstallSnapshot,
    LogAck,
    LogAppend,
    NewAverager,
    StandbyMessage,
)
from geo_ray.training.membership import MemberChange
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.uploads import UploadRequest as Transfer
from geo_ray.transport.wire.message import BACKGROUND, CONTROL, DATA, Message

UPDATE = UpdateMessage("a", 2, 7, 5, 32, torch.tensor([1.0, -2.0]), final=True)
REPLY = ReplyMessage("a", 7, 9, 32, torch.tensor([0.5, 3.0]), checkpoint=4, dropped=True)
PART = UpdateMessage("b", 1, 3, 5, 0, torch.empty(0))

WORDS: list[StandbyMessage] = [
    AveragerRequest(TakeIn(UPDATE), again=True),
    AveragerRequest(Skip("a", 2, 7), again=True),
    AveragerAnswer(3, REPLY, 11, 10),
    AveragerRefusal(3, 7, LinkDownError("it is gone")),
    LogAppend(3, LogEntry(12, TakeIn(UPDATE))),
    LogAppend(3, LogEntry(12, TakeSum((PART,), torch.tensor([4.0, 4.0])))),
    LogAppend(3, LogEntry(12, Skip("a", 2, 7))),
    LogAppend(3, LogEntry(12, Stop())),
    LogAppend(3, LogEntry(12, BeginCheckpoint(5, halt=True))),
    LogAppend(3, LogEntry(12, Leave("b"))),
    LogAppend(3, LogEntry(12, ChangeMembers(MemberChange(("d", "e"), ("b",), "a")))),
    LogAppend(3, LogEntry(12, Begun("d"))),
    LogAppend(3, LogEntry(13, ChangeInterval(7))),
    LogAppend(3, LogEntry(12, Wake(), now_s=4.25)),
    LogAppend(3, LogEntry(12, Promote())),
    InstallSnapshot(
        3,
        12,
        StateSnapshot(
            {"b": torch.ones(2, 3), "c": torch.arange(3, dtype=torch.uint8), "n": torch.empty(0)},
            {"version": 4, "numbers": {"x/a": 0.5}, "exact": {"change": None}},
        ),
    ),
    LogAck(3, 12),
    LogAck(3, 0, follows=False),
    AveragerLost(3, lost=True),
    NewAverager(4, (2, 7)),
]


def same(a: object, b: object) -> bool:
    """Equality of records that hold tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and all(same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Exception):
        return type(a) is type(b) and str(a) == str(b)
    if hasattr(a, "__dataclass_fields__"):
        names = a.__dataclass_fields__
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    return a == b


def nowhere(attempt: int, seq: int) -> None:
    return None


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_every_word_comes_out_as_it_went_in(word: StandbyMessage) -> None:
    message = standby_message("c", word, BACKGROUND, bare=True)
    assert message.kind in KINDS
    assert same(read_standby("a", message, nowhere), word)


def test_acknowledgements_overtake_and_the_log_is_behind() -> None:
    assert standby_message("c", LogAck(1, 1), BACKGROUND, bare=True).lane == CONTROL
    log = LogAppend(1, LogEntry(1, Stop()))
    assert standby_message("c", log, BACKGROUND, bare=True).lane == BACKGROUND
    # A new hub's first answers must not come before the word that it is one.
    lanes = {
        standby_message("c", w, BACKGROUND, bare=True).lane
        for w in (WORDS[2], NewAverager(1, (0, 0)))
    }
    assert lanes == {DATA}


def test_unawaited_messages_are_later_and_complete() -> None:
    """The copy, and entries that are committed already: their sender may be answered by then."""
    late = LogAppend(3, LogEntry(12, TakeIn(UPDATE)), counts=False)
    message = standby_message("a", late, DATA, bare=True)
    assert message.lane == BACKGROUND and len(message.payload) == 8
    snapshot = InstallSnapshot(3, 12, StateSnapshot({}, {}))
    assert standby_message("a", snapshot, DATA, bare=True).lane == BACKGROUND


def test_missing_times_in_a_log_are_omitted() -> None:
    """As headers were before there was any."""
    log = LogAppend(3, LogEntry(12, Stop()))
    assert standby_message("a", log, DATA, bare=True).meta == {
        "leader_term": 3,
        "number": 12,
        "what": "stop",
    }


def test_the_standbys_own_update_is_not_sent_back_to_it() -> None:
    log = LogAppend(3, LogEntry(12, TakeIn(UPDATE)))
    message = standby_message("a", log, DATA, bare=True)
    assert len(message.payload) == 0
    found = read_standby(
        "hub", message, lambda attempt, seq: UPDATE if (attempt, seq) == (2, 7) else None
    )
    assert same(found, log)
    with pytest.raises(FrameError, match="no longer here"):
        read_standby("hub", message, nowhere)
    assert len(standby_message("a", log, DATA, bare=False).payload) == 8


FIELDS = [
    *(
        "leader_term",
        "number",
        "stable",
        "what",
        "lost",
        "last_attempt",
        "last_seq",
        "attempt",
        "seq",
    ),
    *("region", "to", "version", "num_samples", "base_version", "final", "again", "fragment"),
    *(
        "regions",
        "attempts",
        "seqs",
        "base_versions",
        "size_bytes",
        "coded",
        "against",
        "id",
        "halt",
    ),
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from(["update", "yours", "sum", "skip", "stop", "checkpoint", "x"]),
    st.lists(st.integers(-2, 2**40), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
)


@settings(max_examples=300)
@given(
    st.sampled_from([*KINDS, "other"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
    st.binary(max_size=12),
)
def test_any_other_header_is_refused_or_read(kind: str, meta: Any, payload: bytes) -> None:
    try:
        read_standby("a", Message(kind, meta, payload, "x"), nowhere)
    except FrameError:
        return


# ---------------------------------------------------------------- transfers


def transfer(region: str, **more: Any) -> Transfer:
    return Transfer(region, 1, 3, 100, 5, **more)


def test_an_ask_comes_out_as_it_went_in_and_is_always_the_senders_own() -> None:
    ask = transfer("a", norm=2.5, final=True, again=True)
    found, sent = read_ask("a", ask_meta(ask, sent=True))
    assert (found, found.norm, sent) == (ask, 2.5, True)
    assert read_ask("b", ask_meta(ask, sent=False))[0].region == "b"


@pytest.mark.parametrize("norm", [math.nan, -1.0])
def test_a_norm_that_cannot_be_counts_as_none(norm: float) -> None:
    ask, _ = read_ask("a", ask_meta(transfer("a", norm=norm), sent=False))
    assert ask.norm == 0.0


def test_parts_of_a_sum_come_out_as_they_went_in() -> None:
    asks = (transfer("a"), transfer("b"))
    assert PARTS.read(PARTS.write(asks)) == asks
    assert [(u.region, u.attempt, u.seq) for u in headers_of(asks)] == [("a", 1, 3), ("b", 1, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"regions": []},
        {"regions": ["a"]},
        {"regions": ["a", "a"]},
        {"seqs": [1]},
        {"size_bytes": 1 << 50},
        {"attempts": ["x", "y"]},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        PARTS.read(PARTS.write((transfer("a"), transfer("b"))) | change)


def test_only_equal_answers_are_bundled() -> None:
    payload_P = torch.ones(2)
    alike = [ReplyMessage(to, seq, 9, 0, payload_P, own=True) for to, seq in (("a", 3), ("b", 4))]
    assert can_bundle(alike)
    assert read_bundle(bundle_meta(alike), payload_P) == tuple(alike)
    other = ReplyMessage("c", 1, 9, 0, torch.ones(2), own=True)
    marked = ReplyMessage("c", 1, 9, 0, payload_P, own=True, checkpoint=1)
    assert not can_bundle([*alike, other])
    assert not can_bundle([*alike, marked])
    with pytest.raises(FrameError):
        read_bundle(bundle_meta(alike) | {"seqs": [1]}, payload_P)
