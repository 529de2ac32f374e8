"""A process that trains does not wait for what it never uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STEP = """
import sys
import torch
from geo_ray.training.optimizers import AdamW, InnerOptimizer, Momentum, Sgd

params_S = torch.nn.Linear(3, 1).weight.detach().flatten().clone()
InnerOptimizer({optimizer}, params_S).apply(torch.ones(3))
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("optimizer", ["Sgd()", "Momentum()", "AdamW()"])
def test_a_step_does_not_import_the_compiler(optimizer: str) -> None:
    """It is 820 modules, which every worker and parameter server would import."""
    script = _STEP.format(optimizer=optimizer)
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == "False"
