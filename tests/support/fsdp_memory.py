"""Peak memory of FSDP2 training by PyTorch's own tool, without processes or memory.

Run as a program: `python -m tests.support.fsdp_memory` reads cases from standard input as JSON, and
prints the bytes of the peak by kind for each. Tensors are fake, and so is the process group.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.transformer import Block


class Gpt(nn.Module):
    """A decoder with two embeddings that are not tied."""

    def __init__(self, width: int, layers: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width=64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten()
        )


def peak_of(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of the largest total in two steps, by kind."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if case["mixed"]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Gpt(case["width"], case["layers"], case["vocabulary"], case["context"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
        tokens = torch.zeros(case["rows"], case["context"], dtype=torch.int64)
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            for number in range(2):
                model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(kind, "value", kind)): float(count) for kind, count in found.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=int(sys.argv[1]), store=FakeStore())
    print(json.dumps([peak_of(case) for case in json.load(sys.stdin)]))
    dist.destroy_process_group()
