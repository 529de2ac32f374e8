"""A trainer class in the style of torchtitan that joins a run.

It has a device mesh, FSDP2, gradient accumulation, clipping and a learning-rate schedule:

torchrun --nproc-per-node 2 examples/own_loop/titan_style.py ADDRESS REGION CREDENTIALS
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import geo_ray
from geo_ray.joining.site import JoinedRegion, JoinedTraining


@dataclass
class TrainingConfig:
    """Settings of the trainer."""

    lr: float = 0.01
    warmup_steps: int = 4
    rows: int = 4  # of one batch
    accumulated_batches: int = 3
    max_norm: float = 1.0


class Block(nn.Module):
    """A residual block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.RMSNorm(dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out: Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return out


class Trainer:
    """Trains a model in a region.

    Args:
        region: whose rows are used.
        config: settings.
    """

    def __init__(self, region: str, config: TrainingConfig) -> None:
        self.config = config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.mesh = init_device_mesh(self.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 2))
        self.model.to(self.device)
        for block in self.model[1:3]:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        seed = 100 * sum(map(ord, region)) + dist.get_rank()
        self.generator = torch.Generator().manual_seed(seed)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of this rank without end."""
        while True:
            x = torch.randn(self.config.rows, 8, generator=self.generator)
            yield x.to(self.device), (x.sum(1) > 0).long().to(self.device)

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Make one optimizer step over several batches; return the mean loss."""
        config = self.config
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for index in range(config.accumulated_batches):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == config.accumulated_batches - 1)
            x, y = next(batches)
            loss = nn.functional.cross_entropy(self.model(x), y) / config.accumulated_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.max_norm)
        self.optimizer.step()
        self.schedule.step()
        return total

    def train(self, site: JoinedRegion) -> None:
        """Train to the end of the run."""
        with site.training(self.model) as sync:
            self.schedule = self.new_schedule(sync)
            batches = self.batches()
            while not sync.done:
                loss = self.train_step(batches)
                sync.step(rows=self.config.rows * self.config.accumulated_batches, loss=loss)

    def new_schedule(self, sync: JoinedTraining) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm up, then decay linearly to the run's last step."""
        warmup, total = self.config.warmup_steps, sync.total_steps
        if total is None:  # the run ends by rows
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, 1 - step / total)
        )


def train(address: str, region: str, credentials: str) -> Tensor:
    """Train to the end of the run, on every rank; return the model's parameters."""
    trainer = Trainer(region, TrainingConfig())
    group = dist.group.WORLD
    with geo_ray.join(address, region=region, credentials=credentials, group=group) as site:
        trainer.train(site)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


if __name__ == "__main__":
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    norm = train(*sys.argv[1:]).norm()
    if dist.get_rank() == 0:
        print(norm)
    dist.destroy_process_group()
