from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.world_support import Run, experiment


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
