"""The trained model as a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from geo_ray.base.errors import RunDirectoryError
from geo_ray.runs.build import ModelStart, build_shard, initial_parameters
from geo_ray.runs.model_export import export_model
from geo_ray.runs.model_file import (
    about_model,
    keep_longer,
    load_trained,
    save_trained,
)
from geo_ray.training.parameters import read_parameters
from tests.support.job_support import digits, experiment


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.embedding.weight


class TiedTask(type(digits())):
    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Tied()


@pytest.mark.parametrize("task", [digits(), TiedTask(digits().Options())], ids=["digits", "tied"])
def test_the_file_loads_back_into_the_module(tmp_path, task):
    params_P = torch.randn_like(initial_parameters(task, 0))
    before_P = params_P.clone()
    save_trained(task, 0, params_P, tmp_path / "model.safetensors")
    assert torch.equal(params_P, before_P)
    module = task.model(5)  # other values, the same names
    missing, unexpected = load_model(module, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert torch.equal(read_parameters(module), params_P)
    if isinstance(module, Tied):
        assert module.last.weight is module.embedding.weight
        assert torch.equal(module.frozen.weight, task.model(0).frozen.weight)


def test_the_names_are_the_modules(tmp_path):
    task = digits()
    save_trained(task, 0, initial_parameters(task, 0), tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    state = task.model(0).state_dict()
    assert set(tensors) == set(state)
    assert all(torch.equal(tensors[name], value) for name, value in state.items())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    task = digits()
    with pytest.raises(RunDirectoryError, match=r"nowhere"):
        save_trained(task, 0, initial_parameters(task, 0), tmp_path / "nowhere" / "m.safetensors")


def test_shards_begin_with_their_slices_and_own_them():
    config, params_P = experiment(), initial_parameters(digits(), 0)
    us = config.regions[1]
    shards = [build_shard(config, us, i, ModelStart(params_P)) for i in range(us.ps_shards)]
    assert torch.equal(torch.cat([s.params_S for s in shards]), params_P)
    shards[0].params_S.zero_()
    assert not torch.equal(params_P[: shards[0].params_S.numel()], shards[0].params_S)


def test_a_model_of_more_steps_is_put_aside_and_another_is_replaced(tmp_path):
    task, path = digits(), tmp_path / "model.safetensors"
    params_P = initial_parameters(task, 0)

    def write(steps: int):
        aside = keep_longer(path, steps)
        save_trained(task, 0, params_P + steps, path, about_model(experiment(), steps, {}))
        return aside

    assert write(600) is None and write(600) is None and write(700) is None
    long = load_file(path)
    aside = write(640)
    assert aside == tmp_path / "model-700.safetensors"
    assert all(torch.equal(load_file(aside)[name], value) for name, value in long.items())
    assert not torch.equal(*(next(iter(load_file(each).values())) for each in (aside, path)))
    path.write_bytes(b"no model")
    assert keep_longer(path, 1) is None


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_folder_that_is_not_there_is_named(tmp_path, ending):
    path = tmp_path / "absent" / f"model.{ending}"
    with pytest.raises(RunDirectoryError, match="cannot be written") as caught:
        export_model(digits(), digits().model(0), path, {})
    assert f"Create the directory {path.parent}" in caught.value.fix


@pytest.mark.parametrize("place", [-1, -1000])
def test_a_flipped_bit_of_a_weight_is_found_when_the_file_is_loaded(tmp_path, place):
    task, path = digits(), tmp_path / "m.safetensors"
    save_trained(task, 0, initial_parameters(task, 0), path)
    load_trained(task, 0, path)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(RunDirectoryError, match="is damaged"):
        load_trained(task, 0, path)
