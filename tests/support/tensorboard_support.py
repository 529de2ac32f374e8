"""Reads what TensorBoard reads."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event as Record


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """A second reader: records are a length, its checksum, the bytes and theirs."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            record = Record.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in record.summary.value:
                found.setdefault(value.tag, []).append((record.step, value.simple_value))
    return found
