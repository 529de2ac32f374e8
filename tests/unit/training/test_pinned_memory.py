"""Which memory is pinned for a GPU; a fake driver records it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from geo_ray.training.worker import pin_memory


@pytest.mark.parametrize("code", [0, 712])
def test_neighbours_are_pinned_together(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    calls: list[tuple[int, int]] = []

    def register(start: int, size: int, flags: int) -> int:
        assert flags == 0
        calls.append((start, size))
        return code

    driver = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr("torch.cuda.cudart", lambda: driver)
    whole = torch.zeros(20_000)
    first, second, far = whole[:1000], whole[1016:2000], whole[10_000:]
    pin_memory([far, second, first])
    start = whole.data_ptr()
    assert calls == [(start, 8000), (start + 40_000, 40_000)]
