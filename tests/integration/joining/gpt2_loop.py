"""A loop that trains GPT-2 of transformers with tied embeddings, clipping and a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from geo_ray.joining.site import join
from tests.support.join_support import SEEDING, WAIT_S, vector_of

ROWS, CONTEXT, VOCABULARY, STEPS = 12, 32, 96, 12  # rows for 1, 2 or 3 ranks


def gpt2() -> Any:
    """A small GPT-2 without dropout, which random numbers of ranks would make different."""
    with SEEDING:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=CONTEXT,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


def rows_of(region: str, step: int, rank: int, world_size: int) -> Tensor:
    """A rank's token rows of a step."""
    generator = torch.Generator().manual_seed(sum(map(ord, region)) * 1000 + step)
    steps = torch.randint(0, 4, (ROWS, CONTEXT), generator=generator)
    share = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return (steps.cumsum(1) % VOCABULARY)[share]


@dataclass(frozen=True)
class Gpt2Loop:
    """The loop of a region."""

    address: str
    region: str
    folder: Path

    def __call__(self, group: Any = None) -> tuple[Tensor, float, int]:
        """Train; returns the parameters, the last loss and the number of slices of this rank."""
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        model = gpt2()
        if group is not None:
            mesh = init_device_mesh("cpu", (world_size,))
            for block in model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": others, "weight_decay": 0.0, "lr": 2e-3},
            ],
            lr=1e-3,
            foreach=False,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: min(1, (t + 1) / 3) * (1 + math.cos(math.pi * t / STEPS)) / 2
        )
        path = self.folder / f"{self.region}.pem"
        with (
            join(
                self.address, region=self.region, credentials=path, group=group, wait_s=WAIT_S
            ) as site,
            site.training(model) as sync,
        ):
            while not sync.done:
                tokens = rows_of(self.region, sync.steps, rank, world_size)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                sync.step(rows=len(tokens), loss=loss)
        return vector_of(model), float(loss.detach()), world_size


def run_gpt2(loop: Gpt2Loop, group: Any) -> tuple[Tensor, float, int]:
    return loop(group)
