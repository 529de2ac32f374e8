"""Messages inside a run survive their trip as headers and bytes, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError, GeoRayError, NonFiniteError
from geo_ray.base.types import Span, StepReport
from geo_ray.training import wire_format as messages
from geo_ray.training.effects import Assignment
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.shard import Contribution
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta

UPDATE = UpdateMessage("eu", 2, 7, 5, 64, torch.arange(5.0), final=True, fragment=3, grad_sq=2.5)
REPLY = ReplyMessage("eu", 7, 6, 128, torch.arange(5.0), True, stop=True, checkpoint=4, halt=True)


def over_the_wire(meta: Meta) -> Meta:
    return decode_meta(encode_meta(meta))


def same(a: Any, b: Any) -> bool:
    names = type(a).__dataclass_fields__
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


# ------------------------------------------------------------------ round trips


def test_update() -> None:
    meta = over_the_wire(messages.update_meta(UPDATE))
    assert same(messages.read_update(meta, messages.as_bytes(UPDATE.payload_P)), UPDATE)


@pytest.mark.parametrize("checkpoint", [None, 0, 4])
def test_reply(checkpoint: int | None) -> None:
    reply = ReplyMessage("eu", 7, 6, 128, torch.ones(3), checkpoint=checkpoint)
    meta = over_the_wire(messages.reply_meta(reply))
    assert same(messages.read_reply(meta, messages.as_bytes(reply.payload_P)), reply)


def test_reply_with_every_flag() -> None:
    meta = over_the_wire(messages.reply_meta(REPLY))
    assert same(messages.read_reply(meta, messages.as_bytes(REPLY.payload_P)), REPLY)


@pytest.mark.parametrize(
    "answer",
    [
        Assignment(1, 4, Span(0, 8)),
        Assignment(1, 4, Span(96, 8), evaluate=True),
        Assignment(1, 9, None, True),
    ],
)
def test_answer(answer: Assignment) -> None:
    assert messages.read_answer(1, over_the_wire(messages.answer_meta(answer))) == answer


@pytest.mark.parametrize(
    "report",
    [
        StepReport(Span(0, 8), 0.5, 0.1, None),
        StepReport(Span(8, 8), None, 0.1, "loss_not_finite"),
        StepReport(Span(0, 8), 0.5, 0.1, grad_sq=1e40),
        StepReport(Span(0, 8), 0.5, 0.1, learning_rate=0.01),
    ],
)
def test_report(report: StepReport) -> None:
    assert messages.read_reports(over_the_wire(messages.report_meta(report))) == [report]


def test_contributions() -> None:
    given = (Contribution(0, 16), Contribution(3, 0))
    assert messages.read_contributions(over_the_wire(messages.contributions_meta(given))) == given
    coded = (Contribution(0, 16, -0.5), Contribution(3, 16, 1.5))
    assert messages.read_contributions(over_the_wire(messages.contributions_meta(coded))) == coded


def test_stats() -> None:
    stats = {"rows": np.array([3.0]), "histogram": np.array([1.0, 0.0, 1e300])}
    meta, payload = messages.stats_message(7, stats, 3, final=True)
    meta = over_the_wire(meta)
    assert messages.read_stats(meta, payload) == {k: v.tolist() for k, v in stats.items()}
    assert (meta["version"], meta["rows"], meta["final"]) == (7, 3, True)


def test_refusal_keeps_the_kind_of_the_error() -> None:
    error = NonFiniteError("update 3 of region 'eu' is not finite")
    seq, found = messages.read_refusal(over_the_wire(messages.refusal_meta(3, error)))
    assert seq == 3
    assert type(found) is NonFiniteError
    assert (found.message, found.fix) == (error.message, error.fix)


def test_refusal_of_a_newer_release() -> None:
    meta: Meta = {"seq": 3, "code": "NOT_KNOWN_YET", "message": "who knows", "fix": "update"}
    _, found = messages.read_refusal(meta)
    assert type(found) is GeoRayError
    assert found.message == "who knows"


# ------------------------------------------------------------------ bytes


def test_bytes_are_a_view_and_tensors_share_them() -> None:
    given = torch.zeros(3)
    view = messages.as_bytes(given)
    given[1] = 1.0
    assert np.frombuffer(view, np.float32).tolist() == [0.0, 1.0, 0.0]
    buffer = bytearray(8)
    messages.as_tensor(buffer, 2).fill_(1.0)
    assert np.frombuffer(buffer, np.float32).tolist() == [1.0, 1.0]


def test_read_only_bytes_are_copied() -> None:
    data = np.ones(2, np.float32).tobytes()
    messages.as_tensor(data).zero_()
    assert np.frombuffer(data, np.float32).tolist() == [1.0, 1.0]


def test_no_bytes() -> None:
    assert messages.as_tensor(None).shape == (0,)
    assert messages.as_tensor(b"", 0).shape == (0,)
    assert messages.as_bytes(torch.empty(0)).nbytes == 0


@pytest.mark.parametrize(("size", "count"), [(7, None), (8, 3), (0, 1)])
def test_bytes_of_another_size_are_refused(size: int, count: int | None) -> None:
    with pytest.raises(FrameError, match=f"payload of {size} bytes"):
        messages.as_tensor(bytes(size), count)


# ------------------------------------------------------------------ refusals


def readers() -> list[tuple[str, Meta, Callable[[Meta], Any]]]:
    error = NonFiniteError("x")
    report = messages.report_meta(StepReport(Span(0, 8), 0.5, 0.1, "why"))
    stats, payload = messages.stats_message(1, {"rows": np.ones(1)}, 1, final=False)
    earlier = StepReport(Span(0, 8), 0.5, 0.1, unused=(1,))
    reports = messages.report_meta(StepReport(Span(8, 8), 0.5, 0.1, "why"), [earlier])
    del report["op"], reports["op"], stats["op"]
    return [
        ("update", messages.update_meta(UPDATE), lambda m: messages.read_update(m, None)),
        ("reply", messages.reply_meta(REPLY), lambda m: messages.read_reply(m, None)),
        (
            "answer",
            messages.answer_meta(Assignment(0, 1, Span(0, 8))),
            lambda m: messages.read_answer(0, m),
        ),
        ("report", report, messages.read_reports),
        ("reports", reports, messages.read_reports),
        ("refusal", messages.refusal_meta(1, error), messages.read_refusal),
        ("stats", stats, lambda m: messages.read_stats(m, payload)),
        (
            "contributions",
            {"workers": [0], "samples": [8], "weights": []},
            messages.read_contributions,
        ),
    ]


CASES = [(name, meta, read, key) for name, meta, read in readers() for key in meta]


@pytest.mark.parametrize(
    ("meta", "read", "key"), [c[1:] for c in CASES], ids=[f"{c[0]}-{c[3]}" for c in CASES]
)
def test_every_field_is_checked(meta: Meta, read: Callable[[Meta], Any], key: str) -> None:
    """One field gone, one of a type that no field has, one negative."""
    with pytest.raises(FrameError, match=f"no field '{key}'"):
        read({name: value for name, value in meta.items() if name != key})
    with pytest.raises(FrameError, match=f"'{key}'"):
        read(meta | {key: b"bytes"})
    if type(meta[key]) is int:
        for wrong in (-1, 2**63, True, 1.0):
            with pytest.raises(FrameError, match=f"'{key}'"):
                read(meta | {key: wrong})


@pytest.mark.parametrize(
    "changes",
    [{"sizes": [2]}, {"sizes": []}, {"sizes": [1, 1]}, {"names": ["a", "b"]}],
)
def test_stats_that_contradict_themselves(changes: Meta) -> None:
    meta, payload = messages.stats_message(1, {"a": np.ones(1)}, 1, final=False)
    with pytest.raises(FrameError, match="statistics"):
        messages.read_stats(meta | changes, payload)


def test_stats_with_half_a_number() -> None:
    meta, payload = messages.stats_message(1, {"a": np.ones(1)}, 1, final=False)
    with pytest.raises(FrameError, match="statistics"):
        messages.read_stats(meta, bytes(payload)[:-1])


def test_contributions_of_unequal_length() -> None:
    with pytest.raises(FrameError, match="'samples': 1"):
        messages.read_contributions({"workers": [0, 1], "samples": [8], "weights": [1.0]})


def test_numbers() -> None:
    assert fields.number({"x": 1}, "x") == 1.0
    assert fields.optional_number({"x": None}, "x") is None
    assert fields.optional_text({"x": None}, "x") is None
    with pytest.raises(FrameError, match="not a number"):
        fields.number({"x": True}, "x")
    with pytest.raises(FrameError, match="not a list"):
        fields.counts({"x": 3}, "x")
    with pytest.raises(FrameError, match="each a text"):
        fields.texts({"x": [1]}, "x")
