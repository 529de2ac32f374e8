"""Metrics of classification, against their definitions, and as sums over regions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score
from torch import nn
from torch.nn import functional as F  # noqa: N812

from geo_ray.base.errors import TaskOutputError
from geo_ray.base.text import metrics_text
from geo_ray.data.tasks.base import Stats
from geo_ray.data.tasks.classification import (
    MOST_RECALLS,
    Labelled,
    balanced_weights,
    classification_loss,
    classification_metrics,
    classification_stats,
)


def rows(classes: int, count: int = 400) -> tuple[nn.Module, Labelled]:
    """A model that gives its inputs as logits, and skewed labels that they tell something of."""
    chance = np.random.default_rng(classes)
    labels = np.minimum(chance.geometric(0.5, count) - 1, classes - 1)
    logits = chance.normal(size=(count, classes)) + np.eye(classes)[labels]
    return nn.Identity(), Labelled(torch.from_numpy(logits).float(), torch.from_numpy(labels))


def part(batch: Labelled, rows: slice) -> Labelled:
    return Labelled(batch.inputs[rows], batch.labels[rows])


def added(parts: list[Stats]) -> Stats:
    return {name: sum((each[name] for each in parts), np.zeros(1)) for name in parts[0]}


def test_two_classes_have_the_metrics_of_their_definitions() -> None:
    model, batch = rows(2)
    metrics = classification_metrics(classification_stats(model, batch))
    labels, guessed = batch.labels.numpy(), batch.inputs.argmax(1).numpy()
    scores = (batch.inputs[:, 1] - batch.inputs[:, 0]).numpy()
    expected = {
        "loss": F.cross_entropy(*batch).item(),
        "accuracy": (labels == guessed).mean(),
        "base_rate": max((labels == 0).mean(), (labels == 1).mean()),
        "recall_0": recall_score(labels, guessed, pos_label=0),
        "recall_1": recall_score(labels, guessed, pos_label=1),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert set(metrics) == {*expected, "auc", "auc_error"}
    assert abs(metrics["auc"] - roc_auc_score(labels, scores)) <= metrics["auc_error"] < 0.01


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_model_that_diverged_is_told_by_its_loss(value: float) -> None:
    model, batch = rows(2)
    batch.inputs[3] = value
    stats = classification_stats(model, batch)
    assert not np.isfinite(stats["loss"]).any()
    assert stats["positives"].sum() + stats["negatives"].sum() == len(batch.labels)


def test_recalls_of_many_classes_are_their_mean_and_the_least() -> None:
    model, batch = rows(MOST_RECALLS)
    recalls = {f"recall_{n}" for n in batch.labels.tolist()}
    metrics = classification_metrics(classification_stats(model, batch))
    assert set(metrics) == {"loss", "accuracy", "base_rate", *recalls}
    model, batch = rows(MOST_RECALLS + 1)
    metrics = classification_metrics(classification_stats(model, batch))
    each = recall_score(
        batch.labels, batch.inputs.argmax(1), average=None, labels=batch.labels.unique()
    )
    assert metrics["recall_mean"] == pytest.approx(each.mean())
    assert metrics["recall_least"] == pytest.approx(each.min())
    assert not {"recall_0", "auc"} & set(metrics)


@pytest.mark.parametrize("classes", [2, 5])
def test_sums_of_regions_give_exactly_the_metrics_of_all_rows(classes: int) -> None:
    """One of the regions has rows of a single label, and so no AUC."""
    model, batch = rows(classes)
    order = torch.argsort(batch.labels, stable=True)
    batch = Labelled(batch.inputs[order], batch.labels[order])
    whole = classification_stats(model, batch)
    parts = [classification_stats(model, part(batch, s)) for s in (slice(0, 60), slice(60, None))]
    assert "recall_1" not in classification_metrics(parts[0])
    assert "auc" not in classification_metrics(parts[0])
    for name, value in added(parts).items():
        assert np.array_equal(value, whole[name]) or name == "loss"
    one, other = classification_metrics(added(parts)), classification_metrics(whole)
    assert one.pop("loss") == pytest.approx(other.pop("loss"))
    assert one == other


def test_class_weights_weigh_rows_and_add_up_over_batches() -> None:
    model, batch = rows(3)
    weights = balanced_weights([int(n) for n in torch.bincount(batch.labels)])
    assert np.mean([weights[label] for label in batch.labels]) == pytest.approx(1)
    each = F.cross_entropy(*batch, reduction="none") * torch.tensor(weights)[batch.labels]
    assert classification_loss(model, batch, weights).item() == pytest.approx(each.mean().item())
    assert classification_loss(model, batch, [1.0] * 3).item() == pytest.approx(
        classification_loss(model, batch).item()
    )
    halves = [part(batch, s) for s in (slice(0, 100), slice(100, None))]
    mean = sum(len(h.labels) * classification_loss(model, h, weights) for h in halves) / 400
    assert float(mean) == pytest.approx(each.mean().item())
    plain, weighted = (
        classification_stats(model, batch),
        classification_stats(model, batch, weights),
    )
    assert weighted.pop("loss").item() == pytest.approx(each.sum().item(), rel=1e-5)
    assert all(np.array_equal(value, plain[name]) for name, value in weighted.items())


@pytest.mark.parametrize("counts", [[], [3, 0]])
def test_weights_of_a_class_without_rows_are_refused(counts: Any) -> None:
    with pytest.raises(TaskOutputError, match="not defined"):
        balanced_weights(counts)


def test_rows_that_the_loss_leaves_out_have_no_label() -> None:
    model, batch = rows(2)
    batch.labels[:50] = -100
    metrics = classification_metrics(classification_stats(model, batch))
    kept = batch.labels[50:]
    assert metrics["base_rate"] == pytest.approx(
        max((kept == 0).float().mean(), (kept == 1).float().mean())
    )


def test_a_line_of_text_shows_the_first_metrics() -> None:
    few = {"loss": 0.21, "accuracy": 0.93}
    assert metrics_text(few) == "loss 0.21, accuracy 0.93"
    many = few | {f"recall_{n}": 0.5 for n in range(6)}
    assert metrics_text(many).endswith("recall_2 0.5, 3 more")
