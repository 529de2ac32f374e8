"""Distribution of rows over regions, determined by the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from geo_ray.base.errors import ConfigError, ShardEmptyError
from geo_ray.base.model import StrictModel
from geo_ray.base.text import listed

Ints = np.ndarray[Any, np.dtype[np.int64]]


class IidSplit(StrictModel):
    """Equal parts of randomly chosen rows."""

    kind: Literal["iid"] = "iid"


class RatioSplit(StrictModel):
    """Parts in given proportions, of randomly chosen rows."""

    kind: Literal["ratio"] = "ratio"
    ratios: dict[str, Annotated[float, Field(gt=0)]] = Field(
        description="region -> its relative number of rows; 2 and 1 give two thirds and one third"
    )


class DirichletSplit(StrictModel):
    """Label skew: each label has separate proportions, drawn from a Dirichlet distribution."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(gt=0, description="0.1 is strong skew, 100 is nearly none")


class ByLabelSplit(StrictModel):
    """Extreme skew: each region has all rows of its labels, which are adjacent values."""

    kind: Literal["by_label"] = "by_label"


class LabelGroupsSplit(StrictModel):
    """Groups of regions with the same labels; each label belongs to one group."""

    kind: Literal["label_groups"] = "label_groups"
    groups: int = Field(
        ge=1, description="number of groups; region number i of the file is in group i % groups"
    )


OneSplit = IidSplit | RatioSplit | DirichletSplit | ByLabelSplit | LabelGroupsSplit
SplitConfig = Annotated[OneSplit, Field(discriminator="kind")]
"""One of the splits, distinguished by `kind`."""


def assign(
    split: OneSplit,
    labels_N: np.ndarray[Any, Any] | None,
    num_rows: int,
    regions: Sequence[str],
    seed: int,
    classes: Ints | None = None,
) -> Ints:
    """Assign each row to a region.

    Args:
        split: the kind of split.
        labels_N: integer label of each row (N,); needed by the splits by label.
        num_rows: N.
        regions: the regions, in order.
        seed: determines the result together with the other arguments.
        classes: (C,) all labels, if several parts (training, held-out) must have the same skew;
            None for those in ``labels_N``.

    Returns:
        (N,) int64, index into ``regions``.

    Raises:
        ConfigError: if regions, ratios or labels do not fit the split.
        ShardEmptyError: if a region gets no row.
    """
    if not regions or len(set(regions)) != len(regions):
        raise ConfigError(
            f"split.regions: {listed(regions)} has a region twice"
            if regions
            else "split.regions: no regions"
        )
    if seed < 0:
        raise ConfigError(f"split.seed: {seed} is negative")
    if labels_N is not None and len(labels_N) != num_rows:
        raise ConfigError(f"split: {len(labels_N)} labels for {num_rows} rows")
    rows_rng = np.random.default_rng([seed, 0])
    out_N = np.empty(num_rows, dtype=np.int64)
    match split:
        case IidSplit():
            _deal(out_N, rows_rng.permutation(num_rows), np.ones(len(regions)))
        case RatioSplit(ratios=ratios):
            if set(ratios) != set(regions):
                raise ConfigError(
                    f"split.ratios: has {listed(sorted(ratios))}, the regions are "
                    f"{listed(sorted(regions))}"
                )
            shares = np.array([ratios[region] for region in regions])
            _deal(out_N, rows_rng.permutation(num_rows), shares)
        case DirichletSplit() | ByLabelSplit() | LabelGroupsSplit():
            if labels_N is None:
                raise ConfigError(
                    f"split.kind: {split.kind} needs labels, and the task has no label column",
                    fix="Use iid or ratio.",
                )
            known = np.unique(labels_N if classes is None else classes)
            shares_CR = _label_shares(split, len(known), regions, seed)
            for label, shares_R in zip(known, shares_CR, strict=True):
                rows = np.flatnonzero(labels_N == label)
                _deal(out_N, rows_rng.permutation(rows), shares_R)
    _refuse_empty(out_N, split.kind, regions)
    return out_N


def _label_shares(
    split: DirichletSplit | ByLabelSplit | LabelGroupsSplit,
    num_labels: int,
    regions: Sequence[str],
    seed: int,
) -> np.ndarray[Any, Any]:
    """Return the proportion of each label per region: (C labels, R regions)."""
    if isinstance(split, DirichletSplit):
        # A separate random stream: proportions must not depend on the number of rows.
        rng = np.random.default_rng([seed, 1])
        return rng.dirichlet(np.full(len(regions), split.alpha), size=num_labels)
    if isinstance(split, LabelGroupsSplit):
        if split.groups > min(num_labels, len(regions)):
            raise ConfigError(
                f"split.groups: {split.groups} groups for {num_labels} labels and {len(regions)} "
                "regions",
                fix="Use at most as many groups as labels and regions.",
            )
        group_R = np.arange(len(regions)) % split.groups
        group_C = np.arange(num_labels) % split.groups
        return np.equal.outer(group_C, group_R).astype(np.float64)
    if num_labels < len(regions):
        raise ConfigError(
            f"split.kind: by_label has {num_labels} labels for {len(regions)} regions",
            fix="Use fewer regions, or another split.",
        )
    shares_CR = np.zeros((num_labels, len(regions)))
    for index, owned in enumerate(np.array_split(np.arange(num_labels), len(regions))):
        shares_CR[owned, index] = 1.0
    return shares_CR


def _deal(out_N: Ints, rows: Ints, shares_R: np.ndarray[Any, Any]) -> None:
    """Cut ``rows`` into runs in the given proportions, exact to less than one row per cut."""
    edges = np.rint(np.cumsum(shares_R) / np.sum(shares_R) * len(rows)).astype(np.int64)
    out_N[rows] = np.searchsorted(edges, np.arange(len(rows)), side="right")


def _refuse_empty(out_N: Ints, kind: str, regions: Sequence[str]) -> None:
    counts = np.bincount(out_N, minlength=len(regions))
    empty = [region for region, count in zip(regions, counts, strict=True) if count == 0]
    if empty:
        raise ShardEmptyError(
            f"split {kind}: region {empty[0]!r} gets no row of {len(out_N)}",
            fix="Use more rows, another seed, a larger alpha or a more balanced ratio.",
        )
