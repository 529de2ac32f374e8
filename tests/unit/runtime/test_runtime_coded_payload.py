"""Coded payloads survive their trip as headers and bytes, and wrong ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Coded, LossyBlocks
from geo_ray.codecs.dgt import Dgt
from geo_ray.training import wire_format as messages
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta

DATA_B = torch.arange(7, dtype=torch.uint8)
LOOSE = LossyBlocks(
    torch.tensor([3, 0, 70_000], dtype=torch.int32),
    torch.arange(15, dtype=torch.uint8).view(3, 5),
    bands=2,
)
TIGHT = Coded("topk", 4, DATA_B)
PARTS = Coded("dgt", 4, DATA_B, LOOSE)
UPDATE = UpdateMessage("eu", 2, 7, 5, 64, torch.empty(0), coded=PARTS, against=5)


def over_the_wire(meta: Meta) -> Meta:
    return decode_meta(encode_meta(meta))


def trip(message: UpdateMessage | ReplyMessage) -> Any:
    payload = bytes(messages.payload_bytes(message))
    assert len(payload) == message.size_bytes + (
        0 if message.coded is None or message.coded.lossy is None else 4 * 3
    )
    if isinstance(message, UpdateMessage):
        return messages.read_update(over_the_wire(messages.update_meta(message)), payload)
    return messages.read_reply(over_the_wire(messages.reply_meta(message)), payload)


def same_coded(a: Coded, b: Coded) -> bool:
    assert (a.kind, a.num) == (b.kind, b.num) and torch.equal(a.data_B, b.data_B)
    if a.lossy is None or b.lossy is None:
        return a.lossy is b.lossy
    ids = torch.equal(a.lossy.ids_L, b.lossy.ids_L) and a.lossy.ids_L.dtype == b.lossy.ids_L.dtype
    return ids and torch.equal(a.lossy.blocks_LK, b.lossy.blocks_LK) and a.lossy.bands == 2


@pytest.mark.parametrize("coded", [TIGHT, PARTS], ids=["data", "data and lossy blocks"])
@pytest.mark.parametrize("against", [None, 0, 5])
def test_a_coded_payload_survives_the_trip(coded: Coded, against: int | None) -> None:
    update = replace(UPDATE, coded=coded, against=against)
    reply = ReplyMessage("eu", 7, 6, 128, torch.empty(0), coded=coded, against=against)
    for message in (update, reply):
        found = trip(message)
        assert same_coded(found.coded, coded) and found.against == against
        assert found.payload_P.numel() == 0


def test_reliable_parts_are_not_copied() -> None:
    view = messages.payload_bytes(replace(UPDATE, coded=TIGHT))
    DATA_B[0] = 9
    assert view[0] == 9
    DATA_B[0] = 0


def test_a_vector_is_as_before() -> None:
    update = replace(UPDATE, coded=None, against=None, payload_P=torch.arange(3.0))
    found = messages.read_update(messages.update_meta(update), messages.payload_bytes(update))
    assert found.coded is None and torch.equal(found.payload_P, update.payload_P)


def test_loose_blocks_of_differential_transmission() -> None:
    codec = Dgt(block_bytes=16, reliable_fraction=0.25)
    x_P = torch.randn(100, generator=torch.Generator().manual_seed(0))
    coded = codec.encode(x_P, {}, 0)
    update = replace(UPDATE, coded=coded)
    found = messages.read_update(messages.update_meta(update), messages.payload_bytes(update))
    assert torch.equal(codec.decode(found.coded), x_P)


def test_all_blocks_lost() -> None:
    none = LossyBlocks(LOOSE.ids_L[:0], LOOSE.blocks_LK[:0], 2)
    update = replace(UPDATE, coded=replace(PARTS, lossy=none))
    found = messages.read_update(messages.update_meta(update), messages.payload_bytes(update))
    assert found.coded.lossy.blocks_LK.shape == (0, 5)
    # As a bridge passes it on.
    assert messages.payload_bytes(found) == messages.payload_bytes(update)


@pytest.mark.parametrize(
    "key", ["num", "data_bytes", "loose_blocks", "loose_block_bytes", "loose_bands"]
)
def test_every_field_is_checked(key: str) -> None:
    meta, payload = messages.update_meta(UPDATE), messages.payload_bytes(UPDATE)
    with pytest.raises(FrameError, match=f"no field '{key}'"):
        messages.read_update({k: v for k, v in meta.items() if k != key}, payload)
    for wrong in (-1, 2**63, True, 1.0, None, b"bytes"):
        with pytest.raises(FrameError, match=f"'{key}'"):
            messages.read_update(meta | {key: wrong}, payload)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_bytes": 6},
        {"data_bytes": 2**62},
        {"loose_blocks": 2},
        {"loose_blocks": 2**40, "loose_block_bytes": 2**40},
        {"loose_block_bytes": 4},
        {"loose_bands": 0},
    ],
)
def test_sizes_that_contradict_each_other(changes: Meta) -> None:
    meta = messages.update_meta(UPDATE) | changes
    with pytest.raises(FrameError, match="its header says"):
        messages.read_update(meta, messages.payload_bytes(UPDATE))


def test_bytes_may_lie_anywhere() -> None:
    """A slice of a larger buffer, at an odd address, read-only or not."""
    payload = b"x" + bytes(messages.payload_bytes(UPDATE))
    for buffer in (memoryview(payload)[1:], memoryview(bytearray(payload))[1:]):
        found = messages.read_update(messages.update_meta(UPDATE), buffer)
        assert same_coded(found.coded, PARTS)
    assert np.frombuffer(payload, np.uint8)[1] == 0
