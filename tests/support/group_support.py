"""A rank that trains with the optimizer of groups, in processes of `Ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from geo_ray.data.tasks.groups import parameter_runs
from geo_ray.joining.checkpoint import CheckedLoadPlanner, SafetensorsReader, SafetensorsWriter
from geo_ray.joining.layout import trained_parameters
from geo_ray.joining.rank_saver import LoopState, root_of
from geo_ray.runtime.group_task import HeldOptimizer
from geo_ray.training.optimizers import AdamW, Momentum, OneOptimizer
from tests.support.join_support import Loop, loss_of, rows_of, small_model, vector_of

OPTIMIZERS: dict[str, OneOptimizer] = {
    "adamw": AdamW(lr=0.01, eps=1e-6),
    "momentum": Momentum(lr=0.1),
}


def trained(
    sharding: str, kind: str, steps: tuple[int, int], given: Path, into: Path, group: Any
) -> Tensor:
    """Train some steps, after loading a checkpoint if they are not the first; save another.

    Returns:
        The parameters.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    runs = parameter_runs(object(), small_model())
    model = Loop("", "eu", Path(), sharding).model(world_size)
    optimizer = HeldOptimizer(OPTIMIZERS[kind], trained_parameters(model), runs)
    params = dict(trained_parameters(model))
    loop = LoopState(model, {"optimizer": optimizer}, {})
    if steps[0]:
        reader, planner = SafetensorsReader(given / "model"), CheckedLoadPlanner()
        with torch.no_grad():
            dcp.load(params, storage_reader=reader, planner=planner)
        loop.load(root_of(given, "run", "eu"), 1, rank)
    for step in range(*steps):
        for param in optimizer.params:
            param.grad = None
        loss_of(model, rows_of("eu", step, rank, world_size)).backward()
        optimizer.step(step)
    dcp.save(params, storage_writer=SafetensorsWriter(into / "model"))
    folder = root_of(into, "run", "eu").folder(1)
    dcp.save(loop.tree(rank), storage_writer=SafetensorsWriter(folder))
    return vector_of(model)
