"""Generators are left as they were, and no two threads wait for each other over them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from geo_ray.base.random_state import generators_restored, seed_generators, seeded

# Tensors that are freed while a generator is read let another thread run just then.
MANY = """
import gc, threading
import torch
from {names}

def use(thread):
    for number in range(3000):
        loss = (torch.ones(3, requires_grad=True) * 2).sum()
        circle = [loss]
        circle.append(circle)
        with {block}:
            {inside}

gc.set_threshold(5)
threads = [threading.Thread(target=use, args=(n,), daemon=True) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("through")
"""


def test_a_block_leaves_no_trace_and_has_the_numbers_of_its_seed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded(1):
        first = torch.rand(4)
    with generators_restored():
        seed_generators(1)
        assert torch.equal(torch.rand(4), first)
    with pytest.raises(ValueError, match="in it"), generators_restored():
        torch.rand(9)
        raise ValueError("in it")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("names", "block", "inside"),
    [
        ("geo_ray.base.random_state import seeded", "seeded(number)", "pass"),
        (
            "geo_ray.base.random_state import generators_restored, seed_generators",
            "generators_restored()",
            "seed_generators(number)",
        ),
    ],
)
def test_threads_do_not_wait_for_each_other_for_ever(names: str, block: str, inside: str) -> None:
    program = MANY.format(names=names, block=block, inside=inside)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "through\n", done.stderr
