"""Runs that are served in the test's process, and regions that join them.

Regions of one rank are threads. Regions of several ranks are processes of `Ranks`, which a fork
server makes without another import of PyTorch. Optimizers and `fully_shard` import `torch._dynamo`
when they are first used; it is imported here, so that neither the ranks nor the threads of several
regions do it while other regions wait for them.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import HolderServer, JoinServer
from geo_ray.joining.site import JoinedTraining, join
from geo_ray.joining.slices import SavedRun
from geo_ray.transport.security.certs import Authority

WAIT_S = 120.0
ROWS = 6  # of a region and step
HELD: dict[JoinServer, list[HolderServer]] = {}  # holders of slices, by server
SEEDING = threading.Lock()  # regions are threads, and torch has one generator


def terms(regions: Sequence[str], steps: int, **sections: Any) -> JoinTerms:
    """The terms of a run, from plain values."""
    values = {"name": "test", "regions": list(regions), "steps": steps, **sections}
    return JoinTerms.model_validate_json(json.dumps(values))


def write_credentials(folder: Path, regions: Sequence[str], run_id: str = "run") -> None:
    """Write ``REGION.pem`` for each region, and that of the server."""
    authority, key = Authority.create("test"), secrets.token_bytes(32)
    for name in (*regions, SERVER):
        JoinCredentials(name, run_id, key, authority.issue(name)).write(folder / f"{name}.pem")


@contextmanager
def serving(
    run: JoinTerms,
    folder: Path,
    *,
    lost_after_s: float = WAIT_S,
    resumed: SavedRun | None = None,
    least: int = 1,
    here: Sequence[int] | None = None,
) -> Iterator[tuple[JoinServer, str]]:
    """Serve a run; yields the server and its address.

    Holders of slices are in this process, or only those that are named by ``here``.
    """
    write_credentials(folder, run.regions)
    server = JoinServer(
        run,
        JoinCredentials.read(folder / f"{SERVER}.pem"),
        lost_after_s=lost_after_s,
        resumed=resumed,
        least=least,
    )
    holders = [
        HolderServer(
            run,
            number,
            JoinCredentials.read(folder / f"{SERVER}.pem"),
            server.address,
            saved=() if resumed is None else resumed.slices,
        )
        for number in (range(1, run.holders) if here is None else here)
    ]
    HELD[server] = holders
    try:
        yield server, "geo-ray://{}:{}".format(*server.address)
    finally:
        for each in holders:
            each.close()
        server.close()
        del HELD[server]


def served_model(server: JoinServer) -> Tensor:
    """The final parameters, of all holders."""
    parts = [server.service.averagers, *(each.holder.averagers for each in HELD[server])]
    return torch.cat([each.model_H for each in parts])


def saved_run(server: JoinServer) -> SavedRun:
    """The parts of all holders of a checkpoint."""
    saved = server.service.saved_run
    others = [part for each in HELD[server] for part in each.holder.averagers.saved()]
    return replace(saved, slices=(*saved.slices, *others))


def small_model(seed: int = 0, width: int = 13) -> nn.Module:
    """A model whose parameters do not divide evenly among ranks."""
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        )


def rows_of(region: str, step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step."""
    seed = sum(map(ord, region)) * 1000 + step
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(ROWS, 7, generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return x[own], y[own]


def loss_of(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(rows[0]).float(), rows[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6, foreach=False)


def vector_of(model: nn.Module) -> Tensor:
    """All parameters, fp32 (P,); collective if they are sharded."""
    return torch.cat(
        [
            (p.full_tensor() if isinstance(p, DTensor) else p).detach().reshape(-1).float()
            for p in model.parameters()
        ]
    )


@dataclass(frozen=True)
class Loop:
    """A training loop of a region; picklable."""

    address: str
    region: str
    folder: Path
    sharding: str = "none"  # fsdp, hsdp or ddp
    dtype: str = "float32"
    wait_s: float = WAIT_S
    checkpoints: Path | None = None
    width: int = 13

    def model(self, world_size: int) -> nn.Module:
        model = small_model(width=self.width).to(getattr(torch, self.dtype))
        if self.sharding == "ddp":
            return DistributedDataParallel(model)
        if self.sharding in ("fsdp", "hsdp"):
            shape = (world_size,) if self.sharding == "fsdp" else (2, world_size // 2)
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in (model[0], model[2]):  # type: ignore[index]
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def run(
        self, each: Callable[[JoinedTraining], None] | None = None, group: Any = None
    ) -> tuple[Tensor, int]:
        """Train to the end of the run; returns the parameters and the steps."""
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        model = self.model(world_size)
        optimizer = adamw(model)
        path = self.folder / f"{self.region}.pem"
        dtype = getattr(torch, self.dtype)
        state = {} if self.checkpoints is None else {"optimizer": optimizer}
        with (
            join(
                self.address, region=self.region, credentials=path, group=group, wait_s=self.wait_s
            ) as site,
            site.training(model, state=state, checkpoints=self.checkpoints) as sync,
        ):
            for _ in sync.batches(range(1000)):
                x, y = rows_of(self.region, sync.steps, rank, world_size)
                loss = loss_of(model, (x.to(dtype), y))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sync.step(rows=len(x), loss=loss)
                if each is not None:
                    each(sync)
        return vector_of(model), sync.steps


def train_all(loops: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run the loop of each region in a thread; returns results or errors by region."""
    found: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            found[name] = loops[name]()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found


def _serve_rank(rank: int, world_size: int, port: int, orders: Any) -> None:
    """Run loops until the pipe is closed."""
    torch.set_num_threads(1)
    longest = timedelta(seconds=WAIT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, timeout=longest)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=longest)
    try:
        while (order := orders.recv()) is not None:
            function, arguments = order
            try:
                orders.send(function(*arguments, dist.group.WORLD))
            except Exception as error:
                orders.send(error)
    except EOFError:
        pass
    dist.destroy_process_group()


class Ranks:
    """A process group of gloo ranks that runs functions; the last argument is the group.

    The ranks meet at a store of this process: a port that is chosen for rank 0 could be taken by
    another process until rank 0 listens on it.
    """

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.join_support"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self._pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, self._store.port, theirs)
            process = context.Process(target=_serve_rank, args=arguments)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self) -> list[Any]:
        """The results or errors of all ranks; without those of one, no further call is possible."""
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(WAIT_S):
                self.close()
                raise AssertionError(f"rank {rank} gives no answer")
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        """End the ranks; a rank that runs a function still is killed."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def run_loop(loop: Loop, group: Any) -> tuple[Tensor, int]:
    return loop.run(group=group)


def call_without_group(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank of `Ranks` that finds the process group itself."""
    return function(*arguments[:-1])


def diloco_of_batches(
    models: Mapping[str, nn.Module],
    losses: Mapping[str, Sequence[Sequence[Callable[[nn.Module], Tensor]]]],
    *,
    interval: int,
    lr: float,
    momentum: float,
    clip: float | None = None,
    schedule: Callable[[int], float] = lambda _: 1.0,
    weight_decay: float = 0.01,
) -> Tensor:
    """DiLoCo with AdamW in plain PyTorch, with uniform weights and Nesterov momentum.

    Args:
        models: the model of each region, with equal parameters.
        losses: for each region and optimizer step, the losses of the accumulated batches.
        interval: steps between exchanges.
        lr: outer learning rate.
        momentum: outer momentum.
        clip: largest norm of gradients.
        schedule: factor of the inner learning rate 0.01 by step.
        weight_decay: of AdamW.
    """
    outer = vector_of(next(iter(models.values())))
    velocity = torch.zeros_like(outer)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
        for name, model in models.items()
    }
    (count,) = {len(each) for each in losses.values()}
    for step in range(count):
        for name, model in models.items():
            optimizer = optimizers[name]
            optimizer.param_groups[0]["lr"] = 0.01 * schedule(step)
            optimizer.zero_grad()
            for loss in losses[name][step]:
                (loss(model) / len(losses[name][step])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if (step + 1) % interval == 0:
            changes = [outer - vector_of(model) for model in models.values()]
            delta = torch.stack(changes).mean(0)
            velocity = momentum * velocity + delta
            outer = outer - lr * (delta + momentum * velocity)
            for model in models.values():
                nn.utils.vector_to_parameters(outer.clone(), model.parameters())
    return outer
