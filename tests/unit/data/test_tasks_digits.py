from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from geo_ray.data.tasks.checked_calls import describe
from geo_ray.data.tasks.digits import Digits

CPU = torch.device("cpu")


def task() -> Digits:
    return Digits(Digits.Options())


def test_size() -> None:
    assert describe(task()).parameters == 29_914


def test_the_held_out_fifth_is_stratified_and_fixed() -> None:
    data, other = task().dataset(0), task().dataset(1)
    assert len(data.train["label"]) == 1433
    assert len(data.heldout["label"]) == 364
    assert np.array_equal(data.heldout["image"], other.heldout["image"])
    both = np.concatenate([data.train["label"], data.heldout["label"]])
    share = np.bincount(data.heldout["label"]) / np.bincount(both)
    assert np.all(np.abs(share - 0.2) < 0.005)


def test_the_rows_are_those_of_scikit_learn() -> None:
    pixels, labels = load_digits(return_X_y=True)
    data = task().dataset(0)
    for part in (data.train, data.heldout):
        rows = np.column_stack([part["image"] * 16, part["label"]])
        assert {row.tobytes() for row in rows} <= {
            row.tobytes() for row in np.column_stack([pixels, labels])
        }


def test_pixels_are_scaled_to_the_unit_interval() -> None:
    images = task().dataset(0).train["image"]
    assert images.min() == 0.0
    assert images.max() == 1.0


def test_the_two_parts_share_no_scan() -> None:
    data = task().dataset(0)
    train = {row.tobytes() for row in data.train["image"]}
    assert not any(row.tobytes() in train for row in data.heldout["image"])


def test_an_untrained_model_is_undecided() -> None:
    digits = task()
    batch = digits.collate(digits.dataset(0).heldout, CPU)
    metrics = digits.metrics(digits.evaluate(digits.model(0), batch))
    assert metrics["loss"] == pytest.approx(np.log(10), abs=0.1)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_plain_training_reaches_the_target(name: str) -> None:
    digits = task()
    data, model = digits.dataset(0), digits.model(0)
    optimiser: torch.optim.Optimizer
    if name == "momentum":
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.005)
    rows = len(data.train["label"])
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(rows) for _ in range(21)])
    for step in range(300):
        picked = order[96 * step : 96 * (step + 1)]
        batch = digits.collate({key: a[picked] for key, a in data.train.items()}, CPU)
        optimiser.zero_grad()
        digits.loss(model, batch).backward()
        optimiser.step()
    metrics = digits.metrics(digits.evaluate(model, digits.collate(data.heldout, CPU)))
    assert metrics["accuracy"] >= 0.97
