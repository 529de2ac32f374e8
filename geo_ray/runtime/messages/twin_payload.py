"""A copy of the averager as bytes: one safetensors file, read with the limits of a checkpoint's."""

from __future__ import annotations

import json
from typing import Final, cast

import torch

from geo_ray.checkpoint.header import check_header, encode_header, header_bytes
from geo_ray.config.canonical import JSONObject, canonical_json
from geo_ray.errors import CheckpointCorruptError, FrameError
from geo_ray.training.averager.twin import AveragerTwin
from geo_ray.transport.wire.frames import Buffer

_CONTROL: Final = "control"


def twin_bytes(twin: AveragerTwin) -> memoryview:
    """The copy's plain values, then its tensors, those with the largest elements first."""
    tensors = {
        name: twin.tensors[name]
        for name in sorted(twin.tensors, key=lambda k: (-twin.tensors[k].element_size(), k))
    }
    header = encode_header(
        tensors, {_CONTROL: canonical_json(cast(JSONObject, twin.control)).decode()}
    )
    found = bytearray(len(header) + sum(t.nbytes for t in tensors.values()))
    found[: len(header)] = header
    place = len(header)
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[place : place + tensor.nbytes] = flat.numpy().data
        place += tensor.nbytes
    return memoryview(found)


def read_twin(payload: Buffer) -> AveragerTwin:
    """The inverse of `twin_bytes`; the tensors are the caller's own.

    Raises:
        FrameError: it makes no sense.
    """
    view = memoryview(payload).cast("B")
    try:
        metadata, entries = check_header(view, view.nbytes)
        control = json.loads(metadata[_CONTROL])
    except (CheckpointCorruptError, ValueError, KeyError, RecursionError) as error:
        raise FrameError(f"a copy of the averager cannot be read: {error}") from error
    if not isinstance(control, dict):
        raise FrameError("a copy of the averager has no plain values")
    start, tensors = header_bytes(bytes(view[:8])), {}
    for entry in entries:
        own = bytearray(view[start + entry.start : start + entry.stop])
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
        if own:
            flat = torch.frombuffer(own, dtype=entry.dtype)
            tensors[entry.name] = flat.reshape(entry.shape)
    return AveragerTwin(tensors, control)
