from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geo_ray.base.errors import NonFiniteError, SchemaMismatchError, TaskOutputError
from geo_ray.data.columns import ColumnType
from geo_ray.data.tasks.base import Batch, Columns, Stats, num_rows
from geo_ray.data.tasks.checked_calls import (
    checked_collate,
    checked_dataset,
    checked_evaluate,
    checked_loss,
    checked_metrics,
    checked_model,
)
from geo_ray.data.tasks.classification import classification_metrics
from geo_ray.data.tasks.groups import group_runs
from geo_ray.data.tasks.load import check_task_columns
from geo_ray.runs.model_file import load_trained, save_trained
from geo_ray.training.parameters import read_parameters


class Fixed:
    """A task that returns what it is told to."""

    columns = {"x": "float32"}  # noqa: RUF012
    label_column = None

    def __init__(self, output: Any) -> None:
        self.output = output

    def _answer(self) -> Any:
        if isinstance(self.output, Exception):
            raise self.output
        return self.output() if isinstance(self.output, FunctionType) else self.output

    def model(self, seed: int) -> nn.Module:
        return self._answer()

    def collate(self, columns: Columns, device: torch.device) -> Batch:
        return None

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._answer()

    def evaluate(self, model: nn.Module, batch: Batch) -> Stats:
        return self._answer()

    def metrics(self, stats: Stats) -> dict[str, float]:
        return {}


MODEL = nn.Linear(1, 1)


def with_grad(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1


def test_a_good_loss_passes() -> None:
    loss = with_grad(2.0)
    assert checked_loss(Fixed(loss), MODEL, None) is loss


@pytest.mark.parametrize(
    ("output", "part"),
    [
        (1.0, "returned float, not a tensor"),
        (None, "returned NoneType"),
        (torch.zeros(3, requires_grad=True), "shape (3,)"),
        (torch.zeros(1, requires_grad=True), "shape (1,)"),
        (torch.tensor(1), "int64"),
        (torch.tensor(1.0), "no gradient"),
    ],
)
def test_a_wrong_loss_is_named(output: object, part: str) -> None:
    with pytest.raises(TaskOutputError) as caught:
        checked_loss(Fixed(output), MODEL, None)
    assert part in str(caught.value)
    assert "Fixed.loss" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"Fixed\.loss"):
        checked_loss(Fixed(with_grad(value)), MODEL, None)


def test_an_exception_of_the_task_names_method_and_line() -> None:
    with pytest.raises(TaskOutputError) as caught:
        checked_loss(Fixed(KeyError("image")), MODEL, None)
    text = str(caught.value)
    assert "Fixed.loss raised KeyError: 'image'" in text
    assert "test_tasks_guard.py:" in text


def test_errors_of_the_tree_pass_unchanged() -> None:
    with pytest.raises(SchemaMismatchError):
        checked_loss(Fixed(SchemaMismatchError("column")), MODEL, None)


def test_good_statistics_pass() -> None:
    stats = {"rows": np.ones(1), "histogram": np.zeros(5)}
    assert checked_evaluate(Fixed(stats), MODEL, None) is stats


@pytest.mark.parametrize(
    ("output", "part"),
    [
        (None, "non-empty dict"),
        ({}, "non-empty dict"),
        ({"rows": 3.0}, "'rows' is float"),
        ({"rows": np.ones(1, np.float32)}, "'rows' is float32[1]"),
        ({"rows": np.ones((1, 1))}, "'rows' is float64[1, 1]"),
        ({"rows": np.array(1.0)}, "'rows' is float64[]"),
    ],
)
def test_wrong_statistics_are_named(output: object, part: str) -> None:
    with pytest.raises(TaskOutputError) as caught:
        checked_evaluate(Fixed(output), MODEL, None)
    assert part in str(caught.value)


def test_statistics_that_are_not_finite() -> None:
    with pytest.raises(NonFiniteError, match="'loss'"):
        checked_evaluate(Fixed({"loss": np.array([np.nan])}), MODEL, None)


@pytest.mark.parametrize(
    ("output", "part"),
    [
        (3, "returned int, not an nn.Module"),
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2).double(), "parameter 'weight' is torch.float64"),
    ],
)
def test_a_model_that_cannot_be_trained_here(output: object, part: str) -> None:
    with pytest.raises(TaskOutputError) as caught:
        checked_model(Fixed(output), 0)
    assert part in str(caught.value)


class Views(nn.Module):
    """Parameters and buffers that share memory in several ways."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        if what == "expanded":
            self.scale = nn.Parameter(torch.ones(1).expand(3))
        if what == "tied by data":
            self.other.weight.data = self.one.weight.data.t()
        if what == "a buffer of a parameter":
            self.register_buffer("shadow", self.one.weight.data)
        if what == "extra":
            self.extra = Extra()
        if what == "sparse":
            self.register_buffer("links", torch.eye(3).to_sparse())
        if what == "cut from one":
            both = torch.randn(6, 3)
            self.one.weight, self.other.weight = (nn.Parameter(part) for part in both.split(3))
        if what == "tied":
            self.other.weight = self.one.weight
        if what == "constants":
            self.register_buffer("ones", torch.ones(1).expand(3))
            self.register_buffer("part", torch.arange(6.0)[:3])
            self.register_buffer("low", self.part[:2])
            self.register_buffer("twos", torch.ones(3))
            self.register_buffer("same", self.twos)


class Extra(nn.Module):
    def get_extra_state(self) -> str:
        return "a text"

    def set_extra_state(self, state: str) -> None:
        """Takes none."""


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("expanded", "'scale' is expanded"),
        ("tied by data", "'one.weight' and 'other.weight' are different tensors"),
        ("a buffer of a parameter", "'one.weight' and 'shadow' are different tensors"),
        ("extra", "'extra._extra_state'"),
        ("sparse", "'links'"),
    ],
)
def test_a_model_that_could_not_be_trained_or_saved_is_refused(what: str, part: str) -> None:
    with pytest.raises(TaskOutputError) as caught:
        checked_model(Fixed(lambda: Views(what)), 0)
    assert part in str(caught.value)


@pytest.mark.parametrize("what", ["tied", "constants", "cut from one"])
def test_a_model_that_shares_memory_in_a_harmless_way_is_saved(what: str, tmp_path: Path) -> None:
    task, path = Fixed(lambda: Views(what)), tmp_path / "model.safetensors"
    params_P = read_parameters(checked_model(task, 0)) + 1
    save_trained(task, 0, params_P, path)
    loaded = load_trained(task, 0, path)
    assert torch.equal(read_parameters(loaded), params_P)
    for name, constant in checked_model(task, 0).named_buffers():
        assert torch.equal(loaded.get_buffer(name), constant)


def test_a_lazy_layer_is_refused_by_name_until_it_has_a_shape() -> None:
    def made() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(2))
        model(torch.zeros(1, 3))
        return model

    with pytest.raises(TaskOutputError, match=r"'0\.weight' has no shape yet"):
        checked_model(Fixed(lambda: nn.Sequential(nn.LazyLinear(2))), 0)
    with pytest.raises(TaskOutputError, match=r"'0\.running_mean' has no shape yet"):
        norm = [nn.LazyBatchNorm1d(affine=False), nn.Linear(2, 1)]
        checked_model(Fixed(lambda: nn.Sequential(*norm)), 0)
    assert isinstance(checked_model(Fixed(made), 0), nn.Sequential)


class Raises:
    """A task whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        def method(*_: object) -> None:
            raise LookupError(f"wrong {name}")

        return method


def test_an_exception_of_any_method_names_it() -> None:
    task: Any = Raises()
    calls = {
        "collate": lambda: checked_collate(task, {}, torch.device("cpu")),
        "metrics": lambda: checked_metrics(task, {}),
        "dataset": lambda: checked_dataset(task, 0),
        "groups": lambda: group_runs(task, MODEL),
    }
    for name, call in calls.items():
        with pytest.raises(TaskOutputError, match=f"Raises.{name} raised LookupError: wrong"):
            call()


@pytest.mark.parametrize("output", [3.0, {"loss": "small"}, {1: 2.0}, {"loss": np.zeros(2)}])
def test_metrics_that_are_no_numbers_by_name(output: object) -> None:
    class Measured(Fixed):
        def metrics(self, stats: Stats) -> dict[str, float]:
            return self._answer()

    with pytest.raises(TaskOutputError, match=r"Measured\.metrics"):
        checked_metrics(Measured(output), {})
    assert checked_metrics(Measured({"loss": np.float32(2)}), {}) == {"loss": 2.0}


@pytest.mark.parametrize("keeps", [True, False])
def test_batch_norm_is_fine(keeps: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=keeps))
    assert checked_model(Fixed(lambda: model), 0) is model


def test_a_model_that_ignores_the_seed_is_seeded_all_the_same() -> None:
    task = Fixed(lambda: nn.Linear(3, 3))
    before = torch.get_rng_state()
    models = [checked_model(task, seed) for seed in (1, 1, 2)]
    weights = [model.get_parameter("weight") for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "dtype", "length"),
    [
        ("int64", "int64", None),
        ("bool", "bool", None),
        ("uint8[784]", "uint8", 784),
        ("float16[1]", "float16", 1),
    ],
)
def test_column_types(text: str, dtype: str, length: int | None) -> None:
    parsed = ColumnType.parse(text, "x")
    assert (parsed.dtype, parsed.length) == (np.dtype(dtype), length)


@pytest.mark.parametrize(
    "text", ["", "int", "int64[]", "int64[0]", "int64[-1]", "int64 ", "object", "float32[2][3]"]
)
def test_texts_that_are_no_column_type(text: str) -> None:
    with pytest.raises(SchemaMismatchError):
        ColumnType.parse(text, "x")


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "the task has x, y"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(2, np.int64)}, "'x' is float64[3]"),
        ({"x": np.zeros((2, 4), np.float32), "y": np.zeros(2, np.int64)}, "'x' is float32[4]"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros((2, 1), np.int64)}, "'y' is int64[1]"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(3, np.int64)}, "'x' 2, 'y' 3"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.int64(3).reshape(())}, "'y'"),
    ],
)
def test_columns_that_break_the_schema(columns: Columns, part: str) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        check_task_columns({"x": "float32[3]", "y": "int64"}, columns)
    assert part in str(caught.value)


def test_rows_of_columns() -> None:
    assert num_rows({"x": np.zeros((2, 3))}) == 2
    assert num_rows({}) == 0


def test_no_held_out_rows_is_an_error_and_not_a_division_by_zero() -> None:
    with pytest.raises(TaskOutputError, match="held-out"):
        classification_metrics(
            {key: np.zeros(1) for key in ("rows", "loss", "correct", "labels", "hits")}
        )
