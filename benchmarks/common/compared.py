"""Comparisons of strategies inside benchmarks: `geo-ray compare` on a configuration in text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import support
from geo_ray.sweep.compare import Comparison, ComparisonPlan, compare, parse_variant
from geo_ray.sweep.runner import default_jobs
from geo_ray.sweep.trial import Outcome


def compared(
    config: str,
    strategies: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    first_seed: int = 0,
) -> Comparison:
    """Simulate every strategy with its best learning rate.

    Args:
        config: a workload as YAML.
        strategies: variants, as on the command line.
        rates: factors on the learning rate to choose from.
        seeds: runs of each that count.
        first_seed: of those.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "workload.yaml"
        path.write_text(config)
        plan = ComparisonPlan(
            path,
            (),
            tuple(parse_variant(text) for text in strategies),
            tuple(rates),
            tuple(range(first_seed, first_seed + seeds)),
            Path(scratch) / "runs",
            default_jobs(),
        )
        return compare(plan, support.say)


def of(comparison: Comparison, label: str) -> list[Outcome]:
    """The runs of one variant, by seed."""
    return sorted((o for o in comparison.outcomes if o.label == label), key=lambda o: o.seed)


def to_target_s(runs: Sequence[Outcome]) -> list[float]:
    """Seconds to the target; the whole run for one that did not get there, which is too kind."""
    return [run.seconds if run.time_to_target_s is None else run.time_to_target_s for run in runs]


def finals(runs: Sequence[Outcome], metric: str) -> list[float]:
    """The metric at the end of each run; 0 for one that failed."""
    return [run.eval.get(metric) or 0.0 for run in runs]
