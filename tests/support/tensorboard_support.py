"""Reads what TensorBoard reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars by tag, as (step, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in _records(folder):
        for value in record.summary.value:
            found.setdefault(value.tag, []).append((record.step, value.simple_value))
    return found


def tensorboard_hyperparameters(folder: Path) -> dict[str, str | float | bool]:
    """The hyperparameters of the newest session that the plug-in `hparams` finds."""
    found: dict[str, str | float | bool] = {}
    for record in _records(folder):
        for value in record.summary.value:
            if value.tag == "_hparams_/session_start_info":
                assert value.metadata.plugin_data.plugin_name == "hparams"
                data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                given = data.session_start_info.hparams
                found = {name: getattr(v, v.WhichOneof("kind")) for name, v in given.items()}
    return found


def _records(folder: Path) -> Iterator[Record]:
    """A second reader: records are a length, its checksum, the bytes and theirs."""
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            yield Record.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
