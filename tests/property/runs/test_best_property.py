"""What is best: one value after the other comes to the first of the best finite ones."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from geo_ray.telemetry.summary import Best, KeepBest

VALUES = st.lists(
    st.one_of(
        st.none(),
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 0.5]),
        st.floats(-10, 10, allow_nan=False),
    ),
    max_size=30,
)


def fold(rule: KeepBest, values: list[float | None], best: Best | None = None) -> Best | None:
    for step, value in enumerate(values):
        if rule.is_better(value, best):
            best = Best(
                metric=rule.metric,
                mode=rule.mode,
                value=value,
                step=step,
                region=None,
                samples=1,
                metrics={rule.metric: value},
            )
    return best


@given(VALUES, st.sampled_from(["min", "max"]))
def test_the_first_of_the_best_finite_values_is_kept(values: list[float | None], mode: str) -> None:
    found = fold(KeepBest(metric="m", mode=mode), values)
    usable = [v for v in values if v is not None and math.isfinite(v)]
    if not usable:
        assert found is None
        return
    wanted = max(usable) if mode == "max" else min(usable)
    assert (found.value, found.step) == (wanted, values.index(wanted))


@given(VALUES, VALUES, st.sampled_from(["min", "max"]))
def test_going_on_later_is_the_same_as_going_on(
    before: list[float | None], after: list[float | None], mode: str
) -> None:
    """A resume may see values again that came before: they change nothing."""
    rule = KeepBest(metric="m", mode=mode)
    kept = fold(rule, before)
    assert fold(rule, before, kept) == kept
    whole, resumed = fold(rule, [*before, *after]), fold(rule, after, kept)
    assert (whole and whole.value) == (resumed and resumed.value)


@given(VALUES)
def test_the_best_by_another_rule_does_not_count(values: list[float | None]) -> None:
    least = fold(KeepBest(metric="m", mode="min"), values)
    for other in (KeepBest(metric="m", mode="max"), KeepBest(metric="n", mode="min")):
        assert other.known(least) is None
        assert fold(other, values, least) == fold(other, values)
