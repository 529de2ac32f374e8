"""Whatever the overlay, the regions, the segments and the times: one mean for all, counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.network_models.overlay_model import Lines
from geo_ray.transport.overlay.config import AnyOverlay, RackOverlay, TsengineOverlay
from tests.support.overlay_support import KINDS, check_round, model_of, vectors_of

overlays = st.one_of(
    st.sampled_from(list(KINDS.values())),
    st.builds(
        TsengineOverlay,
        buckets=st.integers(1, 4),
        epsilon=st.sampled_from([0.0, 0.3, 1.0]),
        probes=st.integers(0, 2),
        settle_s=st.sampled_from([0.0, 0.02, 0.5]),
    ),
)
times_s = st.floats(0.0, 3.0)


def uneven(num: int, seed: int, delay_s: float) -> Lines:
    random = np.random.default_rng(seed)
    up_N, down_N = random.uniform(2, 20, num), random.uniform(2, 20, num)
    return Lines(up_N, down_N, random.uniform(2, 20, (num, num)), delay_s)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), overlay=overlays, num=st.integers(2, 7), segments=st.integers(1, 9))
def test_every_region_ends_every_round_with_the_mean(
    data: Any, overlay: AnyOverlay, num: int, segments: int
) -> None:
    hub = data.draw(st.integers(0, num - 1), label="hub")
    seed = data.draw(st.integers(0, 1000), label="seed")
    lines = uneven(num, seed, data.draw(st.sampled_from([0.0, 0.05, 0.4]), label="delay"))
    window = data.draw(st.integers(1, 6), label="window")
    model = model_of(overlay, num, segments, hub=hub, lines=lines, seed=seed, window=window)
    for rnd in (1, 2, 3):
        vectors = vectors_of(model, seed + rnd)
        ready_s = data.draw(st.lists(times_s, min_size=num, max_size=num), label="ready")
        check_round(model.run_round(rnd, vectors, ready_s, compute_s=0.5), vectors)
    assert model.committed == [1, 2, 3]
    assert all(node.clashes == 0 for node in model.nodes)
    assert all(len(node._rounds) <= 3 for node in model.nodes)


@settings(max_examples=20, deadline=None)
@given(overlay=overlays, num=st.integers(3, 6), seed=st.integers(0, 1000), data=st.data())
def test_links_that_break_for_a_while_or_for_good_cost_time_and_nothing_else(
    overlay: AnyOverlay, num: int, seed: int, data: Any
) -> None:
    """Any links but those of one region may be cut at any time, and some are mended."""
    model = model_of(overlay, num, 6, seed=seed, stall_s=2.0)
    safe = data.draw(st.integers(0, num - 1), label="safe")
    pairs = [(a, b) for a in range(num) for b in range(a) if safe not in (a, b)]
    for pair in data.draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)):
        both = {pair, pair[::-1]}
        cut_s = data.draw(times_s, label=f"{pair} cut")
        lasts_s = data.draw(st.sampled_from([1.0, 5.0, 30.0]), label=f"{pair} lasts")
        model.at(cut_s, lambda b=both: model.change(lambda lines: lines.cut.update(b)))  # type: ignore[misc]
        model.at(
            cut_s + lasts_s,
            lambda b=both: model.change(lambda lines: lines.cut.difference_update(b)),  # type: ignore[misc]
        )
    for rnd in (1, 2):
        vectors = vectors_of(model, seed + rnd)
        check_round(model.run_round(rnd, vectors), vectors)
    assert model.committed == [1, 2]


def test_racks_may_be_named() -> None:
    overlay = RackOverlay(groups=(("r1", "r3"), ("r0",), ("r4", "r2")))
    model = model_of(overlay, 5, hub=4)
    vectors = vectors_of(model)
    check_round(model.run_round(1, vectors), vectors)
    assert {pair for pair, mbit in model.sent_mbit.items() if mbit} == {
        (3, 1), (1, 4), (0, 4), (2, 4), (1, 3), (4, 1), (4, 0), (4, 2),
    }  # fmt: skip
