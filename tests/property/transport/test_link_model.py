from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from geo_ray.base.errors import InvariantError
from geo_ray.transport.emulation import CHUNK_BYTES, LinkModel, LinkSpec, build_links, link_seed


def _outages(cuts: list[float]) -> tuple[tuple[float, float], ...]:
    cuts = sorted(set(cuts))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


specs = st.builds(
    LinkSpec,
    rate_mbps=st.none() | st.floats(0.1, 1e4),
    delay_s=st.floats(0, 0.3),
    jitter_s=st.just(0.0) | st.floats(0, 0.05),
    loss=st.just(0.0) | st.floats(0, 0.1),
    outages=st.lists(st.floats(0, 50), max_size=6).map(_outages),
)
sends = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 500_000)), min_size=1, max_size=20)


def _run(spec: LinkSpec, sends_: list[tuple[float, int]], seed: int = 1) -> list[float]:
    link, now_s, arrivals = LinkModel(spec, seed), 0.0, []
    for pause_s, size_bytes in sends_:
        now_s += pause_s
        arrivals.append(link.transfer(now_s, size_bytes))
    return arrivals


@given(specs, sends, st.integers(0, 2**64 - 1))
def test_same_seed_same_calls_same_arrivals(
    spec: LinkSpec, sends_: list[tuple[float, int]], seed: int
) -> None:
    assert _run(spec, sends_, seed) == _run(spec, sends_, seed)


@given(specs, sends)
def test_chunk_by_chunk_equals_at_once(spec: LinkSpec, sends_: list[tuple[float, int]]) -> None:
    at_once = _run(spec, sends_)
    link, now_s, arrivals = LinkModel(spec, 1), 0.0, []
    for pause_s, size_bytes in sends_:
        now_s += pause_s
        for start in range(0, size_bytes, CHUNK_BYTES):
            last = link.transfer(now_s, min(CHUNK_BYTES, size_bytes - start))
        arrivals.append(last)
    assert arrivals == at_once


@given(specs, sends)
def test_order_causality_rate_and_outages(spec: LinkSpec, sends_: list[tuple[float, int]]) -> None:
    arrivals = _run(spec, sends_)
    assert arrivals == sorted(arrivals)
    now_s = 0.0
    for (pause_s, size_bytes), arrival_s in zip(sends_, arrivals, strict=True):
        now_s += pause_s
        work_s = 0.0 if spec.rate_mbps is None else size_bytes * 8 / (spec.rate_mbps * 1e6)
        delay_s = spec.delay_s if not spec.jitter_s else 0.0
        assert arrival_s >= now_s + work_s + delay_s - 1e-9
        assert not any(start < arrival_s < end for start, end in spec.outages)


@given(sends, st.floats(0.1, 1e3), st.floats(0, 0.3))
def test_a_plain_link_follows_the_formula(
    sends_: list[tuple[float, int]], rate_mbps: float, delay_s: float
) -> None:
    arrivals = _run(LinkSpec(rate_mbps=rate_mbps, delay_s=delay_s), sends_)
    now_s = free_s = 0.0
    for (pause_s, size_bytes), arrival_s in zip(sends_, arrivals, strict=True):
        now_s += pause_s
        free_s = max(now_s, free_s) + size_bytes * 8 / (rate_mbps * 1e6)
        assert arrival_s == pytest.approx(free_s + delay_s)


@pytest.mark.parametrize("rate_mbps", [None, 8.0])
def test_an_outage_stops_and_resumes_at_the_rate(rate_mbps: float | None) -> None:
    spec = LinkSpec(rate_mbps=rate_mbps, delay_s=0.1, outages=((1.0, 3.0),))
    link = LinkModel(spec, 0)
    work_s = 0.0 if rate_mbps is None else 0.5
    assert link.transfer(0.0, 500_000) == pytest.approx(work_s + 0.1)
    # Half of it arrives before the outage and half after it, had it a rate.
    assert link.transfer(0.65, 500_000) == pytest.approx(0.75 if rate_mbps is None else 3.25)
    assert link.transfer(1.5, 500_000) == pytest.approx(3.0 if rate_mbps is None else 3.75)


def test_loss_costs_round_trips_and_jitter_spreads_around_the_delay() -> None:
    sent = [(10.0, 64 * 1024)] * 4000
    lossy = _run(LinkSpec(delay_s=0.1, loss=0.01), sent)
    late = [arrival_s - 10.0 * (n + 1) for n, arrival_s in enumerate(lossy)]
    hits = sum(delay_s > 0.2 for delay_s in late)
    assert {round(delay_s, 6) for delay_s in late} == {0.1, 0.3}
    assert hits / 4000 == pytest.approx(1 - 0.99**46, abs=0.03)
    jittery = _run(LinkSpec(delay_s=0.1, jitter_s=0.02), sent)
    delays_s = [arrival_s - 10.0 * (n + 1) for n, arrival_s in enumerate(jittery)]
    mean_s = sum(delays_s) / len(delays_s)
    assert mean_s == pytest.approx(0.1, abs=0.002)
    variance = sum((delay_s - mean_s) ** 2 for delay_s in delays_s) / len(delays_s)
    assert variance**0.5 == pytest.approx(0.02, rel=0.1)


def test_bad_specs_and_sizes_are_refused() -> None:
    for outages in (((2.0, 1.0),), ((1.0, 3.0), (2.0, 4.0)), ((-1.0, 1.0),)):
        with pytest.raises(ValidationError, match="outage"):
            LinkSpec(outages=outages)
    with pytest.raises(ValidationError):
        LinkSpec(rate_mbps=0.0)
    with pytest.raises(ValidationError):
        LinkSpec(loss=1.0)
    with pytest.raises(InvariantError):
        LinkModel(LinkSpec(), 0).transfer(0.0, 0)


def test_links_of_an_experiment_share_round_trips_and_not_seeds() -> None:
    links = build_links(
        {
            ("eu", "us"): LinkSpec(delay_s=0.04),
            ("us", "eu"): LinkSpec(delay_s=0.06),
            ("eu", "ap"): LinkSpec(delay_s=0.1),
        },
        seed=5,
    )
    assert links["eu", "us"].round_trip_s == links["us", "eu"].round_trip_s == pytest.approx(0.1)
    assert links["eu", "ap"].round_trip_s == pytest.approx(0.2)
    assert link_seed(5, "eu", "us") == link_seed(5, "eu", "us")
    assert len({link_seed(5, "eu", "us"), link_seed(5, "us", "eu"), link_seed(6, "eu", "us")}) == 3
