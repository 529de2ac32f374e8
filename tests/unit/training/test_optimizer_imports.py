"""A process that trains does not wait for what it never uses."""

from __future__ import annotations

import subprocess
import sys

_STEP = """
import sys
import torch
from geo_ray.training.optimizers import AdamW, InnerOptimizer, Momentum, Sgd

params_S = torch.nn.Linear(3, 1).weight.detach().flatten().clone()
for optimizer in (Sgd(), Momentum(), AdamW()):
    InnerOptimizer(optimizer, params_S).apply(torch.ones(3))
    print(optimizer.kind, "torch._dynamo" in sys.modules)
"""


def test_a_step_does_not_import_the_compiler() -> None:
    """It is 820 modules, which every worker and parameter server would import."""
    said = subprocess.run([sys.executable, "-c", _STEP], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["sgd", "False", "momentum", "False", "adamw", "False"]


_PROCESSES = """
import sys
import geo_ray.runtime.bridge_actor
import geo_ray.runtime.run_actor
import geo_ray.runtime.run_client
import geo_ray.runtime.server_actors
import geo_ray.runtime.worker_actor
import geo_ray.simulator.run

print("torch.distributed.tensor" in sys.modules, "sympy" in sys.modules)
"""


def test_processes_of_a_run_do_not_import_sharded_tensors() -> None:
    """Their import takes longer than that of PyTorch, and only ranks that join have them."""
    command = [sys.executable, "-c", _PROCESSES]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "False"]
