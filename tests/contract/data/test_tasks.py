"""The contract of a task, run over all built-in tasks and the example of docs/guides/tasks.md."""

from __future__ import annotations

import gzip
import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import geo_ray
from geo_ray.data.tasks.base import Columns, Dataset, SelfContained, Task, num_rows
from geo_ray.data.tasks.checked_calls import checked_evaluate, checked_loss, checked_model
from geo_ray.data.tasks.load import Scalar, TaskConfig, check_task_columns, load_task

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[3] / "docs" / "guides" / "tasks.md"


def write_mnist(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for split, rows, opened in (("train", 48, open), ("t10k", 24, gzip.open)):
        suffix = "" if opened is open else ".gz"
        images = rng.integers(0, 256, (rows, 28, 28), np.uint8)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        with opened(directory / f"{split}-images-idx3-ubyte{suffix}", "wb") as file:
            file.write(struct.pack(">IIII", 0x803, rows, 28, 28) + images.tobytes())
        with opened(directory / f"{split}-labels-idx1-ubyte{suffix}", "wb") as file:
            file.write(struct.pack(">II", 0x801, rows) + labels.tobytes())


def write_cifar10(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        records = rng.integers(0, 256, (12, 3073), np.uint8)
        records[:, 0] = np.arange(12) % 10
        (directory / f"{name}.bin").write_bytes(records.tobytes())


def write_example(directory: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (directory / "waves.py").write_text(blocks[0])


def nothing(directory: Path) -> None:
    pass


CASES: dict[str, tuple[str, dict[str, Scalar], Callable[[Path], None], float]] = {
    # name: use, options, what writes its files, a learning rate for plain SGD
    "digits": ("digits", {}, nothing, 0.1),
    "bytelm": ("bytelm", {"size": "0.1M", "max_bytes": 60_000}, nothing, 0.3),
    "ctr": ("ctr", {"rows": 400, "heldout_rows": 200}, nothing, 0.3),
    "lenet-mnist": ("images", {"directory": "."}, write_mnist, 0.3),
    "lenet-cifar10": ("images", {"directory": ".", "format": "cifar10"}, write_cifar10, 0.1),
    "resnet18-cifar10": (
        "images",
        {"directory": ".", "format": "cifar10", "model": "resnet18", "width": 8},
        write_cifar10,
        0.1,
    ),
    "resnet18-mnist": (
        "images",
        {"directory": ".", "model": "resnet18", "width": 8},
        write_mnist,
        0.1,
    ),
    "example": ("waves.py:Waves", {"hidden": 16}, write_example, 0.1),
}


class Case:
    def __init__(self, name: str, directory: Path) -> None:
        use, options, write, self.lr = CASES[name]
        write(directory)
        self.task: Task = load_task(TaskConfig(use=use, options=options), directory)
        assert isinstance(self.task, SelfContained)
        self.data: Dataset = self.task.dataset(3)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    return Case(request.param, tmp_path)


def rows_of(columns: Columns, rows: slice) -> Columns:
    return {name: array[rows] for name, array in columns.items()}


def test_model_follows_from_the_seed_alone(case: Case) -> None:
    first = checked_model(case.task, 1).state_dict()
    torch.rand(7)  # whatever else has used the process's generator
    before = torch.get_rng_state()
    again = checked_model(case.task, 1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    other = checked_model(case.task, 2).state_dict()
    assert list(first) == list(again) == list(other)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_dataset_has_the_columns_of_the_schema(case: Case) -> None:
    for part in (case.data.train, case.data.heldout):
        check_task_columns(case.task.columns, part)
        assert num_rows(part) > 0


def test_dataset_follows_from_the_seed(case: Case) -> None:
    assert isinstance(case.task, SelfContained)
    again = case.task.dataset(3)
    for mine, theirs in ((case.data.train, again.train), (case.data.heldout, again.heldout)):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_collate_takes_read_only_columns_and_a_single_row(case: Case) -> None:
    columns = {name: array[:1].copy() for name, array in case.data.train.items()}
    for array in columns.values():
        array.flags.writeable = False
    model = checked_model(case.task, 0)
    checked_loss(case.task, model, case.task.collate(columns, CPU))


def test_loss_is_the_mean_and_reaches_every_parameter(case: Case) -> None:
    model = checked_model(case.task, 0)
    halves = [rows_of(case.data.train, rows) for rows in (slice(0, 8), slice(8, 16))]
    whole = case.task.collate(rows_of(case.data.train, slice(0, 16)), CPU)
    loss = checked_loss(case.task, model, whole)
    parts = [checked_loss(case.task, model, case.task.collate(half, CPU)) for half in halves]
    assert loss.item() == pytest.approx(sum(part.item() for part in parts) / 2, rel=1e-4)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_evaluation_is_additive_over_any_split_of_rows(case: Case) -> None:
    model = checked_model(case.task, 0)
    rows = min(num_rows(case.data.heldout), 60)
    whole = checked_evaluate(
        case.task, model, case.task.collate(rows_of(case.data.heldout, slice(0, rows)), CPU)
    )
    cuts = [0, 1, rows // 3, rows - 2, rows]
    parts = [
        checked_evaluate(
            case.task, model, case.task.collate(rows_of(case.data.heldout, slice(a, b)), CPU)
        )
        for a, b in itertools.pairwise(cuts)
    ]
    summed = {key: np.sum([part[key] for part in parts], axis=0) for key in whole}
    for key in whole:
        assert all(part[key].shape == whole[key].shape for part in parts)
        # Entries of a histogram may move by one bin, as rounding depends on the batch's size.
        assert summed[key].sum() == pytest.approx(whole[key].sum(), rel=1e-4)
    assert case.task.metrics(summed) == pytest.approx(case.task.metrics(whole), rel=1e-3, abs=1e-3)
    assert all(type(value) is float for value in case.task.metrics(whole).values())


def test_evaluation_changes_nothing(case: Case) -> None:
    model = checked_model(case.task, 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = case.task.collate(rows_of(case.data.heldout, slice(0, 8)), CPU)
    first = checked_evaluate(case.task, model, batch)
    second = checked_evaluate(case.task, model, batch)
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_few_steps_of_sgd_lower_the_loss(case: Case) -> None:
    model = checked_model(case.task, 0)
    batch = case.task.collate(rows_of(case.data.train, slice(0, 24)), CPU)
    optimiser = torch.optim.SGD(model.parameters(), lr=case.lr)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = checked_loss(case.task, model, batch)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]


def test_the_configuration_of_the_page_trains_its_task(tmp_path: Path) -> None:
    write_example(tmp_path)
    (config,) = re.findall(r"```yaml\n(name: waves\n.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "waves.yaml").write_text(config)
    run = geo_ray.simulate(tmp_path / "waves.yaml", {"run.dir": str(tmp_path / "runs")})
    assert run.finished and "rmse" in run.summary.eval
