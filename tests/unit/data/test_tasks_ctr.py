from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from geo_ray.data.tasks.checked_calls import describe
from geo_ray.data.tasks.classification import BINS, auc, auc_error_bound, score_histograms
from geo_ray.data.tasks.ctr import Ctr, generate_clicks

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spread", [0.001, 0.05, 1.0, 8.0, 30.0])
def test_the_histogram_auc_is_within_its_stated_bound(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 2000)
    logits = rng.normal(0, spread, 2000) + labels * spread * rng.uniform(-0.5, 1)
    histograms = score_histograms(logits, labels)
    area, bound = auc(*histograms), auc_error_bound(*histograms)
    assert area is not None
    assert bound is not None
    assert abs(area - roc_auc_score(labels, logits)) <= bound + 1e-12


def test_the_bound_is_small_for_scores_of_ordinary_spread() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 20_000)
    bound = auc_error_bound(*score_histograms(rng.normal(0, 1, 20_000) + labels, labels))
    assert bound is not None
    assert bound < 0.002


def test_equal_scores_count_half_as_in_the_exact_auc() -> None:
    labels = np.array([0, 1, 0, 1, 1])
    logits = np.zeros(5)
    assert auc(*score_histograms(logits, labels)) == roc_auc_score(labels, logits) == 0.5


def test_histograms_hold_every_row_however_extreme() -> None:
    logits = np.array([-1e30, -10.0, 0.0, 10.0, 1e30])
    positives, negatives = score_histograms(logits, np.array([1, 0, 1, 0, 1]))
    assert positives.shape == negatives.shape == (BINS,)
    assert BINS >= 1000
    assert positives.sum() == 3
    assert negatives.sum() == 2
    assert positives[0] == negatives[0] == positives[-1] == negatives[-1] == 1


def test_an_auc_without_both_labels_is_left_out() -> None:
    task = Ctr(Ctr.Options(rows=50, heldout_rows=10))
    columns = {"fields": np.zeros((4, 8), np.int64), "label": np.ones(4, np.int64)}
    metrics = task.metrics(task.evaluate(task.model(0), task.collate(columns, CPU)))
    assert set(metrics) == {"loss"}


def test_clicks_follow_their_true_probabilities() -> None:
    clicks = generate_clicks(1, 50_000, 8, 20)
    probability = 1 / (1 + np.exp(-clicks.logits))
    for low in np.arange(0, 1, 0.2):
        picked = (probability >= low) & (probability < low + 0.2)
        error = abs(clicks.labels[picked].mean() - probability[picked].mean())
        assert error < 4 * np.sqrt(0.25 / picked.sum())
    assert clicks.fields.min() == 0
    assert clicks.fields.max() == 19


def test_another_seed_is_another_truth() -> None:
    first, second = generate_clicks(1, 100, 4, 5), generate_clicks(2, 100, 4, 5)
    assert not np.array_equal(first.fields, second.fields)


def test_training_approaches_but_does_not_beat_the_best_auc() -> None:
    task = Ctr(Ctr.Options())
    best = task.bayes_auc(0)
    assert best == pytest.approx(0.816, abs=0.001)
    data, model = task.dataset(0), task.model(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    for _ in range(600):
        picked = rng.integers(0, 40_000, 256)
        batch = task.collate({key: a[picked] for key, a in data.train.items()}, CPU)
        optimiser.zero_grad()
        task.loss(model, batch).backward()
        optimiser.step()
    metrics = task.metrics(task.evaluate(model, task.collate(data.heldout, CPU)))
    assert best is not None
    assert best - 0.04 < metrics["auc"] < best + 0.01
    assert metrics["auc_error"] < 0.005


def test_bayes_auc_agrees_with_the_exact_auc_of_the_true_probabilities() -> None:
    options = Ctr.Options(rows=100, heldout_rows=3000)
    clicks = generate_clicks(5, 3100, options.fields, options.vocabulary)
    exact = roc_auc_score(clicks.labels[100:], clicks.logits[100:])
    assert Ctr(options).bayes_auc(5) == pytest.approx(exact, abs=0.002)


def test_the_field_offsets_are_no_part_of_the_state() -> None:
    model = Ctr(Ctr.Options(fields=3, vocabulary=4)).model(0)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert describe(Ctr(Ctr.Options())).parameters == 4610
