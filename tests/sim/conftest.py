from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture(scope="module", autouse=True)
def quick_small_models() -> Iterator[None]:
    """One thread, and PyTorch's own convolutions: oneDNN takes twice as long for 2 channels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)
    yield
    torch.backends.mkldnn.set_flags(_enabled=True)
    torch.set_num_threads(threads)
