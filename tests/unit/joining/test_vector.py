"""A rank's share of a module as a vector: dtypes, memory layouts, precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from geo_ray.joining.layout import Layout
from geo_ray.joining.vector import ParameterVector


def vector_of(module: nn.Module) -> ParameterVector:
    return ParameterVector(module, Layout.of(module))


def test_the_vector_has_all_trained_parameters_in_order() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    vector = vector_of(module)
    expected = torch.cat([module[0].weight.reshape(-1), module[0].bias])
    assert torch.equal(vector.read(), expected.detach())
    assert vector.share == ((0, 8),)
    vector.write(torch.arange(8.0))
    assert module[0].weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert module[0].bias.tolist() == [6, 7]


def test_parameters_that_are_not_contiguous() -> None:
    module = nn.Conv2d(2, 3, 2, bias=False)
    module.weight = nn.Parameter(module.weight.detach().to(memory_format=torch.channels_last))
    assert not module.weight.is_contiguous()
    vector = vector_of(module)
    assert torch.equal(vector.read(), module.weight.detach().reshape(-1))
    vector.write(torch.arange(24.0))
    assert torch.equal(module.weight.reshape(-1), torch.arange(24.0))
    assert not module.weight.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_the_module_does_not_reach_the_vector(dtype: torch.dtype) -> None:
    """Steps below the precision of the parameters add up in the vector."""
    module = nn.Linear(1, 1, bias=False).to(dtype)
    vector = vector_of(module)
    with torch.no_grad():
        module.weight.fill_(1.0)
    small = torch.finfo(dtype).eps / 8
    for step in range(1, 9):
        params_S = vector.read()
        assert params_S.item() == 1.0 + (step - 1) * small
        params_S += small
        vector.write(params_S)
    assert module.weight.item() == 1.0 + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_of_the_module_reach_the_vector(dtype: torch.dtype) -> None:
    module = nn.Linear(1, 1, bias=False).to(dtype)
    vector = vector_of(module)
    vector.read()
    vector.write(torch.tensor([1.0003]))
    vector.read().copy_(torch.tensor([1.0003]))
    with torch.no_grad():
        module.weight.add_(0.5)
    rounded = torch.tensor(1.0003).to(dtype).float()
    assert vector.read().item() == pytest.approx(1.0003 + module.weight.item() - rounded.item())


def test_fp32_is_read_exactly() -> None:
    module = nn.Linear(4, 4)
    vector = vector_of(module)
    vector.read()
    with torch.no_grad():
        module.weight.mul_(1e-20)
        module.bias.fill_(3.3e38)
    expected = torch.cat([module.weight.reshape(-1), module.bias]).detach()
    assert torch.equal(vector.read(), expected)


def test_copies_are_awaited_on_the_devices_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current device may be another one, and the vector is changed in place after a write."""
    awaited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", awaited.append)
    vector = vector_of(nn.Linear(2, 1))
    params_S = vector.read()
    assert awaited == []
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(vector, "_devices", (gpu,))
    vector.read()
    assert awaited == [gpu]
    vector.write(params_S)
    assert awaited == [gpu, gpu]
