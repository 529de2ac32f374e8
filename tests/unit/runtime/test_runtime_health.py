"""Whether a run has diverged, held against the rule as the documents state it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.runtime.policies import MIN_STEPS, LossHealth
from geo_ray.storage.manifest import CheckpointManifest

LOSSES = st.one_of(st.none(), st.floats(-1e6, 1e6))


def judged(*windows: list[float | None]) -> list[bool]:
    health, found = LossHealth(), []
    for window in windows:
        for loss in window:
            health.on_step(loss)
        found.append(health.judge())
    return found


def long(loss: float | None) -> list[float | None]:
    return [loss] * MIN_STEPS


def by_the_page(windows: list[list[float | None]]) -> list[bool]:
    """The health rule of docs/design/checkpoint-format.md, computed again from all losses."""
    found: list[bool] = []
    first: float | None = None
    means: list[float] = []
    for number, window in enumerate(windows):
        losses = [loss for loss in window if loss is not None]
        if not window:
            found.append(found[-1] if found else True)
            continue
        if first is None:
            for at, loss in enumerate(window):
                so_far = [x for x in window[:at] if x is not None]
                if loss is None and so_far:
                    first = sum(so_far) / len(so_far)
                    means.append(first)
                    break
        if 2 * len(losses) < len(window):
            found.append(False)
            continue
        if len(losses) < MIN_STEPS:
            before = [x for earlier in windows[:number] for x in earlier if x is not None]
            losses = [*before, *losses][-MIN_STEPS:]
        mean = sum(losses) / len(losses)
        first = mean if first is None else first
        best = min([*means, first])
        found.append(mean <= best + (first - best) / 2 + abs(first) / 4)
        means.append(mean)
    return found


@given(
    st.lists(
        st.one_of(
            st.lists(LOSSES, max_size=4),
            st.builds(lambda loss, more: [loss] * more, LOSSES, st.integers(0, 2 * MIN_STEPS)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_it_is_the_documented_rule(windows: list[list[float | None]]) -> None:
    # Sums in another order may differ in the last bit, so losses here are whole numbers.
    whole = [[None if x is None else float(round(x)) for x in window] for window in windows]
    assert judged(*whole) == by_the_page(whole)


def test_noise_of_the_first_steps_does_not_count_and_a_dead_model_does() -> None:
    windows = [long(loss) for loss in (2.30, 2.28, 2.34, 0.4, 2.30)]
    assert judged(*windows) == [True, True, True, True, False]


def test_a_few_steps_are_judged_with_those_before_them() -> None:
    assert judged(long(2.0), long(0.1), [0.9]) == [True, True, True]
    assert judged(long(2.0), long(0.1), [1e6]) == [True, True, False]


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_run_whose_steps_are_refused_is_not_healthy(loss: float | None) -> None:
    assert judged(long(1.0), long(loss), long(0.9)) == [True, False, True]


def test_a_run_that_diverges_before_its_first_checkpoint_is_compared_with_its_start() -> None:
    assert judged([2.3, 2.2, math.inf], long(1e30)) == [True, False]


def test_without_a_step_the_health_is_unchanged() -> None:
    assert judged([], [1.0]) == [True, True]
    assert judged(long(2.3), long(1e6), [], []) == [True, False, False, False]


@pytest.mark.parametrize("healthy", [True, False])
def test_a_resumed_run_keeps_its_measurements(healthy: bool) -> None:
    health = LossHealth()
    for loss in (2.0, 0.5):
        for _ in range(MIN_STEPS):
            health.on_step(loss)
        health.judge()
    manifest = CheckpointManifest(
        id=1,
        step=2,
        created="now",
        config_digest="0" * 64,
        parts=(),
        healthy=healthy,
        extra={"loss": dict(health.export())},
    )
    again = LossHealth.restore(manifest)
    assert again.judge() is healthy
    again.on_step(1.9)
    assert not again.judge()
    assert LossHealth.restore(manifest.model_copy(update={"extra": {}})).first is None
