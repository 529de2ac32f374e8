"""Exports of a model as safetensors, `.pt` and DCP, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed import checkpoint

from geo_ray.base.errors import ConfigError, RunDirectoryError, TaskOutputError
from geo_ray.runs.model_export import ABOUT_FILE, export_model, format_of
from tests.support.job_support import digits


class Tied(nn.Module):
    """A tied weight, running statistics, a frozen parameter and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, ids):
        return self.last(self.frozen(self.norm(self.embedding(ids))))


@pytest.fixture
def module() -> Tied:
    torch.manual_seed(3)
    module = Tied()
    module(torch.arange(7))  # changes the running statistics
    return module.eval()


IDS = torch.arange(7)
TASK = digits()
ABOUT = {"step": "12", "task": "tied"}


def other() -> Tied:
    """The same module with other values."""
    torch.manual_seed(4)
    return Tied().eval()


def test_safetensors_has_the_modules_names_with_tied_parameters_once(module, tmp_path):
    export_model(TASK, module, tmp_path / "m.safetensors", ABOUT, "safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    state = module.state_dict()
    assert stored.keys() == state.keys() - {"last.weight"}
    assert metadata["last.weight"] == "embedding.weight" and metadata["step"] == "12"
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    assert stored["norm.num_batches_tracked"] == 1 and "mask" not in stored
    plain = {**stored, "last.weight": stored[metadata["last.weight"]]}
    fresh = other()
    fresh.load_state_dict(plain)
    assert torch.equal(fresh(IDS), module(IDS))


def test_dcp_is_read_by_torch(module, tmp_path):
    export_model(TASK, module, tmp_path / "dcp", ABOUT, "dcp")
    fresh = other()
    state = fresh.state_dict()
    assert not torch.equal(fresh(IDS), module(IDS))
    checkpoint.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(IDS), module(IDS))
    assert fresh.last.weight is fresh.embedding.weight
    assert json.loads((tmp_path / "dcp" / ABOUT_FILE).read_text()) == ABOUT
    assert [each.name for each in tmp_path.iterdir()] == ["dcp"], "no temporary directory"


def test_a_compiled_module_is_exported_as_the_module_inside(module, tmp_path):
    export_model(TASK, torch.compile(module), tmp_path / "dcp", ABOUT, "dcp")
    state = other().state_dict()
    checkpoint.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["last.weight"], module.last.weight)


@pytest.mark.parametrize(
    ("path", "form", "found"),
    [
        ("m.safetensors", None, "safetensors"),
        ("m.pth", None, "pt"),
        ("m.pt", "pt", "pt"),
        ("new", "hf", "hf"),
        ("empty", "dcp", "dcp"),
        ("with.dot", "adapter", "adapter"),
    ],
)
def test_the_suffix_or_the_option_gives_the_format(tmp_path, path, form, found):
    (tmp_path / "empty").mkdir()
    assert format_of(tmp_path / path, form) == found


@pytest.mark.parametrize(
    ("path", "form", "message"),
    [
        ("m.onnx", None, r"m\.onnx: not the name of a model file"),
        ("model", None, r"model: not the name of a model file"),
        ("m.pt", "safetensors", r"m\.pt: not the name of a file of format safetensors"),
        ("m.safetensors", "hf", r"format hf writes a directory"),
        ("m", "gguf", r"no export format 'gguf'"),
        ("full", "dcp", r"full exists"),
        ("full/file", "hf", r"file exists"),
        ("folder.pt", None, r"folder\.pt is a directory"),
    ],
)
def test_an_output_that_does_not_fit_the_format_is_refused(tmp_path, path, form, message):
    for folder in ("full", "folder.pt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=message) as caught:
        format_of(tmp_path / path, form)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("form", "message"), [("hf", "not a PreTrainedModel"), ("adapter", "not a PeftModel")]
)
def test_a_module_of_plain_torch_is_refused_by_name(module, tmp_path, form, message):
    with pytest.raises(TaskOutputError, match=f"model of Digits is a Tied, {message}") as caught:
        export_model(TASK, module, tmp_path / "out", ABOUT, form)
    assert "safetensors" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(module, tmp_path: Path):
    with pytest.raises(RunDirectoryError, match="cannot be written") as caught:
        export_model(TASK, module, tmp_path / "absent" / "dcp", ABOUT, "dcp")
    assert f"Create the directory {tmp_path / 'absent'}" in caught.value.fix
