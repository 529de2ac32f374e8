from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from geo_ray.base.errors import ConfigError, ShardEmptyError
from geo_ray.data.split import (
    ByLabelSplit,
    DirichletSplit,
    IidSplit,
    LabelGroupsSplit,
    RatioSplit,
    SplitConfig,
    assign,
)

SEEDS = st.integers(0, 2**32)
REGIONS = ("r0", "r1", "r2", "r3")


@given(st.integers(4, 400), st.integers(1, 4), SEEDS)
def test_iid_shares_differ_by_at_most_one_row(rows: int, num_regions: int, seed: int) -> None:
    region_N = assign(IidSplit(), None, rows, REGIONS[:num_regions], seed)
    counts = np.bincount(region_N, minlength=num_regions)
    assert region_N.shape == (rows,)
    assert counts.sum() == rows
    assert counts.max() - counts.min() <= 1


@given(st.integers(40, 400), st.lists(st.floats(0.5, 5.0), min_size=2, max_size=4), SEEDS)
def test_ratios_are_met_within_a_row(rows: int, shares: list[float], seed: int) -> None:
    regions = REGIONS[: len(shares)]
    split = RatioSplit(ratios=dict(zip(regions, shares, strict=True)))
    counts = np.bincount(assign(split, None, rows, regions, seed), minlength=len(regions))
    assert np.all(np.abs(counts - np.array(shares) / sum(shares) * rows) <= 1.0 + 1e-9)


@given(st.sampled_from(["iid", "ratio", "dirichlet", "by_label"]), SEEDS)
def test_the_seed_fixes_everything(kind: str, seed: int) -> None:
    tree: dict[str, object] = {"kind": kind}
    if kind == "ratio":
        tree["ratios"] = {"r0": 2, "r1": 1}
    if kind == "dirichlet":
        tree["alpha"] = 5
    split = TypeAdapter(SplitConfig).validate_json(json.dumps(tree))
    labels_N = np.arange(300) % 6
    first, again, other = (
        assign(split, labels_N, 300, ("r0", "r1"), s) for s in (seed, seed, seed + 1)
    )
    assert np.array_equal(first, again)
    assert set(first.tolist()) == {0, 1}
    assert kind == "by_label" or not np.array_equal(first, other)


@given(st.integers(4, 12), st.integers(1, 4), SEEDS)
def test_by_label_gives_each_label_one_region(labels: int, num_regions: int, seed: int) -> None:
    labels_N = np.random.default_rng(seed).permutation(np.arange(labels * 5) % labels)
    region_N = assign(ByLabelSplit(), labels_N, len(labels_N), REGIONS[:num_regions], seed)
    owners = [set(region_N[labels_N == label].tolist()) for label in range(labels)]
    assert all(len(owner) == 1 for owner in owners)
    assert set().union(*owners) == set(range(num_regions))


def skew(alpha: float) -> float:
    """Mean over labels of the largest region's share."""
    labels_N = np.arange(6000) % 10
    region_N = assign(DirichletSplit(alpha=alpha), labels_N, 6000, REGIONS, 3)
    shares = [np.bincount(region_N[labels_N == label], minlength=4) / 600 for label in range(10)]
    return float(np.mean([share.max() for share in shares]))


def test_a_smaller_alpha_skews_more() -> None:
    assert skew(0.1) > skew(1.0) + 0.1 > skew(1000.0) + 0.2
    assert skew(1000.0) < 0.3


def test_dirichlet_shares_do_not_depend_on_the_number_of_rows() -> None:
    def shares(per_label: int) -> np.ndarray:
        labels_N = np.arange(per_label * 5) % 5
        region_N = assign(DirichletSplit(alpha=1.0), labels_N, len(labels_N), REGIONS, 0)
        return np.array(
            [np.bincount(region_N[labels_N == c], minlength=4) / per_label for c in range(5)]
        )

    assert np.abs(shares(100) - shares(1000)).max() < 0.02


def test_a_region_without_rows_is_an_error_that_names_it() -> None:
    for split, rows in (
        (IidSplit(), 2),
        (RatioSplit(ratios={"r0": 1000.0, "r1": 1.0, "r2": 1000.0}), 20),
        (DirichletSplit(alpha=0.01), 9),
    ):
        with pytest.raises(ShardEmptyError, match=r"'r[012]'"):
            assign(split, np.zeros(rows, np.int64), rows, REGIONS[:3], 0)


def test_what_does_not_fit_is_refused() -> None:
    labels_N = np.zeros(10, np.int64)
    for call in (
        lambda: assign(IidSplit(), None, 10, (), 0),
        lambda: assign(IidSplit(), None, 10, ("a", "a"), 0),
        lambda: assign(IidSplit(), None, 10, ("a",), -1),
        lambda: assign(RatioSplit(ratios={"a": 1.0}), None, 10, ("a", "b"), 0),
        lambda: assign(RatioSplit(ratios={"a": 1.0, "c": 1.0}), None, 10, ("a", "b"), 0),
        lambda: assign(DirichletSplit(alpha=1.0), None, 10, ("a", "b"), 0),
        lambda: assign(ByLabelSplit(), None, 10, ("a", "b"), 0),
        lambda: assign(ByLabelSplit(), labels_N, 10, ("a", "b"), 0),
        lambda: assign(IidSplit(), labels_N, 9, ("a", "b"), 0),
    ):
        with pytest.raises(ConfigError):
            call()
    for tree in (
        '{"kind": "zigzag"}',
        '{"kind": "dirichlet", "alpha": 0}',
        '{"kind": "ratio", "ratios": {"a": 0}}',
        '{"kind": "iid", "alpha": 1}',
    ):
        with pytest.raises(ValidationError):
            TypeAdapter(SplitConfig).validate_json(tree)


@given(st.integers(1, 4), st.integers(4, 9), SEEDS)
def test_regions_of_a_label_group_share_its_labels_and_no_others(
    groups: int, num_regions: int, seed: int
) -> None:
    labels_N = np.arange(2000) % 10
    names = [f"r{i}" for i in range(num_regions)]
    region_N = assign(LabelGroupsSplit(groups=groups), labels_N, 2000, names, seed)
    for i in range(num_regions):
        mine = set(labels_N[region_N == i].tolist())
        assert mine == {label for label in range(10) if label % groups == i % groups}


def test_more_label_groups_than_labels_or_regions_are_refused() -> None:
    labels_N = np.arange(100) % 3
    for groups, names in ((4, list("abcdef")), (3, ["a", "b"])):
        with pytest.raises(ConfigError, match=r"split\.groups"):
            assign(LabelGroupsSplit(groups=groups), labels_N, 100, names, 0)
