from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from world_support import Run, experiment

# One strategy for each way in which regions, averagers and exchanges go (`Traits`).
ONE_OF_EACH = frozenset(
    (
        "asgd_ga",
        "bsp",
        "decoupled",
        "demo",
        "diloco",
        "diloco_streaming",
        "fedgsync",
        "halos",
        "sma",
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave strategies that go like another, and all seeds but one, to `scripts/test --all`.

    A test that names a few strategies itself keeps them.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    given: list[tuple[pytest.Item, str, str, object]] = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == Path(__file__).parent and isinstance(params.get("kind"), str):
            test = item.nodeid.partition("[")[0]
            kinds[test].add(params["kind"])
            given.append((item, test, params["kind"], params.get("seed")))
    firsts: dict[str, object] = {}
    for item, test, kind, seed in given:
        is_first = firsts.setdefault(test, seed) == seed
        if kinds[test] >= ONE_OF_EACH and not (kind in ONE_OF_EACH and is_first):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once for all experiments of the same regions."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def simulated(data_dir: Path) -> Callable[..., Run]:
    """``simulated(section=...)``: the finished run of the tiny experiment with those sections."""
    return lambda **sections: Run(experiment(**sections), data_dir).go()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
