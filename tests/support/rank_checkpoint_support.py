"""Checkpoints of ranks: a reader of the files without the library, and ranks in one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def plain(value: Any) -> Any:
    """A value of the manifest, as docs/design/checkpoint-format.md describes it."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tuple":
            return tuple(plain(each) for each in content)
        if kind == "dict":
            return {plain(key): plain(each) for key, each in content}
        assert kind == "float"
        return float(content)
    return value


def oracle(folder: Path) -> dict[str, Any]:
    """All tensors and values by key, read with json and safetensors alone."""
    text = (folder / "manifest.json").read_bytes()
    tree = json.loads(text)
    body = json.dumps(
        tree["manifest"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    assert hashlib.sha256(body).hexdigest() == tree["sha256"]
    manifest = tree["manifest"]
    for info in manifest["files"]:
        data = (folder / info["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (info["bytes"], info["sha256"])
    found = {key: plain(each["value"]) for key, each in manifest["values"].items()}
    for key, each in manifest["tensors"].items():
        whole = torch.empty(each["shape"], dtype=TYPES[each["dtype"]])
        times = torch.zeros(each["shape"], dtype=torch.int64)
        for chunk in each["chunks"]:
            corner = zip(chunk["offsets"], chunk["sizes"], strict=True)
            box = tuple(slice(at, at + size) for at, size in corner)
            with safe_open(folder / chunk["file"], "pt") as file:
                whole[box] = file.get_tensor(chunk["key"])
            times[box] += 1
        assert bool((times == 1).all()), key
        found[key] = whole
    return found


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a group that cannot communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(whole: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor; all ranks are in the mesh."""
    ranks = torch.arange(dist.get_world_size()).reshape(tuple(mesh_shape))
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return DTensor.from_local(
        whole[box].clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


class TiedModel(nn.Module):
    """An embedding whose weights are also those of the output."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, dtype=dtype)
        self.middle = nn.Linear(4, 4, dtype=dtype)
        self.output = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.output.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.output(torch.tanh(self.middle(self.embedding(rows))))
        return result
