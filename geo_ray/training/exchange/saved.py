"""Messages between regions as parts of a checkpoint: what was open or answered at the cut.

A message becomes plain values and tensors, which are named ``PREFIX/payload`` or, where the payload
is coded, ``PREFIX/data`` (and ``PREFIX/ids``, ``PREFIX/blocks`` of what may be lost on the way).
What a model carries is ``PREFIX/carried``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, LossyBlocks
from geo_ray.codecs.common.dgt_report import LossyReport
from geo_ray.errors import CheckpointCorruptError
from geo_ray.strategies.base import Reply, Update

M = TypeVar("M", Update, Reply)

# Fields that are no plain values, and those that no checkpoint has: none is made while members
# change, and all who take part at a resume begin it together.
_APART: Final = ("payload_P", "coded", "lossy", "carried_E", "gather", "border", "view")


def save_messages(
    prefix: str, messages: Sequence[Update | Reply]
) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
    """Messages as tensors by name and plain values, in their order.

    A payload that several messages share, as the answers of a round do, is saved once. Tensors are
    not copied.

    Args:
        prefix: of the tensors' names.
        messages: all of one kind.
    """
    tensors: dict[str, Tensor] = {}
    rows: list[dict[str, object]] = []
    places: dict[int, str] = {}
    for number, message in enumerate(messages):
        body = message.payload_P if message.coded is None else message.coded
        place = places.setdefault(id(body), f"{prefix}/{number}")
        row = {f.name: getattr(message, f.name) for f in fields(message) if f.name not in _APART}
        row["place"] = place
        if message.carried_E.numel():  # the same in all answers that share a payload
            row["carried"] = places.setdefault(id(message.carried_E), f"{prefix}/{number}")
            tensors[f"{row['carried']}/carried"] = message.carried_E
        if message.payload_P.is_meta:  # of what was merged already only the header is kept
            row["merged"] = message.payload_P.numel()
        elif message.coded is None:
            tensors[f"{place}/payload"] = message.payload_P
        else:
            row["coded"] = _save_coded(message.coded, place, tensors)
        if isinstance(message, Reply) and message.lossy is not None:
            report = message.lossy
            row["lossy"] = [report.now.hex(), report.late_seq, report.late.hex()]
        rows.append(row)
    return tensors, rows


def load_messages(kind: type[M], tensors: Mapping[str, Tensor], rows: object) -> list[M]:
    """The messages of `save_messages`; those that shared a payload share it again.

    Args:
        kind: of the messages.
        tensors: by name; not copied.
        rows: the plain values; None for a checkpoint that had none.

    Raises:
        CheckpointCorruptError: if they do not fit together.
    """
    try:
        return [_load(kind, tensors, dict(row)) for row in rows or []]  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"a saved {kind.__name__.lower()} cannot be read: {error!r}"
        ) from error


def save_coded(coded: Coded, place: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A coded vector as tensors, whose names begin with ``place``, and plain values."""
    tensors: dict[str, Tensor] = {}
    return tensors, _save_coded(coded, place, tensors)


def load_coded(tensors: Mapping[str, Tensor], row: Mapping[str, Any], place: str) -> Coded:
    """The vector of `save_coded`.

    Raises:
        KeyError: a tensor or a value is missing.
    """
    lossy = None
    if row.get("bands") is not None:
        ids_L, blocks_LK = tensors[f"{place}/ids"], tensors[f"{place}/blocks"]
        lossy = LossyBlocks(ids_L, blocks_LK, int(row["bands"]))
    return Coded(str(row["kind"]), int(row["num"]), tensors[f"{place}/data"], lossy)


def _save_coded(coded: Coded, place: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    tensors[f"{place}/data"] = coded.data_B
    if coded.lossy is not None:
        tensors[f"{place}/ids"] = coded.lossy.ids_L
        tensors[f"{place}/blocks"] = coded.lossy.blocks_LK
    bands = None if coded.lossy is None else coded.lossy.bands
    return {"kind": coded.kind, "num": coded.num, "bands": bands}


def _load(kind: type[M], tensors: Mapping[str, Tensor], row: dict[str, Any]) -> M:
    place, coded, lossy = str(row.pop("place")), row.pop("coded", None), row.pop("lossy", None)
    merged, carried = row.pop("merged", None), row.pop("carried", None)
    known = {f.name for f in fields(kind)}
    if unknown := sorted(row.keys() - known):
        raise KeyError(f"unknown values {unknown}")
    if merged is not None:
        row["payload_P"] = torch.empty(int(merged), device="meta")
    elif coded is None:
        row["payload_P"] = tensors[f"{place}/payload"]
    else:
        row |= {"payload_P": torch.empty(0), "coded": load_coded(tensors, coded, place)}
    if carried is not None:
        row["carried_E"] = tensors[f"{carried}/carried"]
    if lossy is not None:
        now, late_seq, late = lossy
        row["lossy"] = LossyReport(bytes.fromhex(now), late_seq, bytes.fromhex(late))
    return kind(**row)
