"""Three processes that save and load their state as groups of one, two and three ranks."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from geo_ray.base.errors import CheckpointError, CheckpointMissingError
from geo_ray.joining.checkpoint import (
    CheckedLoadPlanner,
    SafetensorsReader,
    SafetensorsWriter,
    commit,
    load,
    write_part,
)
from geo_ray.joining.checkpoint_manifest import PartRecord
from tests.support.rank_checkpoint_support import TiedModel, oracle

WORLD = 3
WAYS = ("sgd-float32", "adamw-bfloat16")
PATIENCE_S = 300.0


def run(rank: int, root: Path) -> None:
    """One of the processes; an assertion that fails ends all of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD
    )
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (1, 2, 3)}  # every process creates all
    for way in WAYS:
        for size, mesh in meshes.items():
            if rank < size:
                loop = Loop(way, mesh, seed=size)
                loop.step(3)
                save(loop, root / f"{way}-{size}", rank, size)
                save_with_torch(loop, root / f"{way}-{size}-torch", mesh)
        dist.barrier()
        for size, mesh in meshes.items():
            loop = Loop(way, mesh, seed=99) if rank < size else None
            for saved in meshes if loop else ():
                assert loop is not None
                check_loading(loop, root / f"{way}-{saved}", None)
                check_loading(loop, root / f"{way}-{saved}-torch", mesh)
    replicated(rank, root, meshes[3])
    hanging(rank, root, meshes[3])
    dist.barrier()
    dist.destroy_process_group()


class Loop:
    """A model that is sharded over a mesh, or replicated, and its optimizer and schedule."""

    def __init__(self, way: str, mesh: DeviceMesh, seed: int, is_sharded: bool = True) -> None:
        optimizer, dtype = way.split("-")
        torch.manual_seed(seed)
        self.model: nn.Module = TiedModel(getattr(torch, dtype))
        if is_sharded:
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.model, process_group=mesh.get_group())
        params = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(params, lr=0.1, momentum=0.9)
            if optimizer == "sgd"
            else torch.optim.AdamW(params, lr=0.01)
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, number: int) -> None:
        for index in range(number):
            rows = torch.arange(5) % (index + 2)
            nn.functional.cross_entropy(self.model(rows).float(), rows).backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])


def save(loop: Loop, folder: Path, rank: int, size: int) -> None:
    """Save without a collective; records travel as text outside of the group."""
    record = write_part(loop.state(), folder, rank, size)
    tell(folder.with_name(f"{folder.name}-record-{rank}"), json.dumps(record.to_json()))
    if rank == 0:
        texts = [wait_for(folder.with_name(f"{folder.name}-record-{n}")) for n in range(size)]
        commit(folder, [PartRecord.from_json(text) for text in texts])


def tell(file: Path, text: str) -> None:
    """Write a text that another process waits for."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


def wait_for(file: Path) -> str:
    """The text of a file that another process writes."""
    end = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.01)
    return file.read_text()


def save_with_torch(loop: Loop, folder: Path, mesh: DeviceMesh) -> None:
    dcp.save(
        loop.state(),
        storage_writer=SafetensorsWriter(folder),
        process_group=mesh.get_group(),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )


def check_loading(loop: Loop, folder: Path, mesh: DeviceMesh | None) -> None:
    """Load, with torch if there is a mesh, and compare with what is in the files."""
    expected = oracle(folder)
    state = loop.state()
    if mesh is None:
        load(state, folder)
    else:
        dcp.load(
            state,
            storage_reader=SafetensorsReader(folder),
            planner=CheckedLoadPlanner(),
            process_group=mesh.get_group(),
        )
    loop.restore(state)
    found = flat("", loop.state())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        mine = found[key].full_tensor() if isinstance(found[key], DTensor) else found[key]
        same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
        assert same, (folder, key, mine, value)
    loop.step(1)  # and it is not the state that is loaded next


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """A nested state by key."""
    if isinstance(value, dict):
        inner = {str(key): each for key, each in value.items()}
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = {str(key): each for key, each in enumerate(value)}
    else:
        return {prefix: value}
    dotted = f"{prefix}." if prefix else ""
    return {k: v for key, each in inner.items() for k, v in flat(dotted + key, each).items()}


def replicated(rank: int, root: Path, mesh: DeviceMesh) -> None:
    """Save the state of DistributedDataParallel; load it sharded, and the other way round."""
    loop = Loop(WAYS[1], mesh, seed=5, is_sharded=False)
    loop.step(2)
    folder = root / "replicated"
    save(loop, folder, rank, WORLD)
    dist.barrier()
    assert [path.name for path in folder.glob("*.safetensors")] == [
        "rank-00000-whole-000.safetensors"
    ]
    check_loading(Loop(WAYS[1], mesh, seed=6), folder, None)
    check_loading(Loop(WAYS[1], mesh, seed=7, is_sharded=False), root / f"{WAYS[1]}-2", mesh)
    background = dcp.async_save(
        loop.state(),
        storage_writer=SafetensorsWriter(root / "async"),
        process_group=dist.new_group(),  # its collectives run next to those of the step
    )
    loop.step(1)
    background.result()
    assert str(oracle(root / "async")) == str(oracle(folder))


def hanging(rank: int, root: Path, mesh: DeviceMesh) -> None:
    """Abandon a checkpoint because one rank hangs; others are not held up."""
    loop = Loop(WAYS[0], mesh, seed=8)
    loop.step(1)
    state = loop.state()
    folder, over = root / "hanging", root / "hanging-over"
    if rank == 2:
        wait_for(over)  # hangs until all is over
    record = write_part(state, folder, rank, WORLD)
    tell(root / f"hanging-record-{rank}", json.dumps(record.to_json()))
    if rank == 0:
        other = PartRecord.from_json(wait_for(root / "hanging-record-1"))
        try:
            commit(folder, [record, other])
        except CheckpointError as error:
            assert "no record of rank 2" in error.message, error
            tell(over, error.message)
        else:
            raise AssertionError("a checkpoint without a third of the model was committed")
        try:
            load(state, folder)
        except CheckpointMissingError:
            pass
        else:
            raise AssertionError("an abandoned checkpoint was loaded")
