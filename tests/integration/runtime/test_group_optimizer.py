"""The optimizer of groups on sharded parameters, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.group_support import trained
from tests.support.join_support import Ranks, loss_of, rows_of, small_model, vector_of

STEPS, HALF = 6, 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    pools = {size: Ranks(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


def plain(kind: str) -> Tensor:
    """The same steps in one process, with the optimizer of PyTorch."""
    model = small_model()
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows_of("eu", step)).backward()
        optimizer.step()
    return vector_of(model)


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("before", "after"), [((2, "fsdp"), (3, "fsdp")), ((3, "fsdp"), (2, "ddp"))]
)
def test_another_group_continues_from_the_state(
    kind: str,
    before: tuple[int, str],
    after: tuple[int, str],
    ranks: dict[int, Ranks],
    tmp_path: Path,
) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    ranks[before[0]].start(trained, before[1], kind, (0, HALF), first, first)
    assert not [each for each in ranks[before[0]].results() if isinstance(each, Exception)]
    ranks[after[0]].start(trained, after[1], kind, (HALF, STEPS), first, then)
    found = ranks[after[0]].results()
    assert not [each for each in found if isinstance(each, Exception)], found
    expected = plain(kind)
    assert float((expected - vector_of(small_model())).abs().max()) > 0.01
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)
