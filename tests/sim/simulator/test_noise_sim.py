"""Gradient noise in whole simulated runs: who measures, and that all measure the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import summarise
from geo_ray.training import noise as region_noise
from tests.support.world_support import BASE, LEARNS, Run, experiment

TWO = {"regions": [{"name": "a", "workers": 2}, {"name": "b", "workers": 2}]}
BSP = {"strategy": {"kind": "bsp"}}
SETTLED = 60  # steps before the loss falls fast


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure at every other step, so that short runs have something to smooth."""
    monkeypatch.setattr(region_noise, "NOISE_EVERY", 2)


def steps(count: int) -> dict[str, object]:
    return {"train": BASE["train"] | {"steps": count}}


def noise_of(run: Run, region: str | None) -> list[Event]:
    return [e for e in run.events if e.kind == "noise" and e["region"] == region]


def whom(run: Run) -> set[str | None]:
    return {e["region"] for e in run.of("noise")}


def test_regions_and_averager_find_the_same_noise(
    simulated: Callable[..., Run], often: None
) -> None:
    run = simulated(**BSP, **TWO, **steps(SETTLED))
    assert whom(run) == {"a", "b", None}
    newest = {name: noise_of(run, name)[-1] for name in ("a", "b", None)}
    for event in newest.values():
        assert (event["step"], event["count"], event["workers"]) == (SETTLED, SETTLED // 2, 2)
    assert [newest[name]["rows"] for name in ("a", "b", None)] == [8, 8, 16]
    for name in ("a", "b"):
        assert newest[name]["trace"] == pytest.approx(newest[None]["trace"], rel=0.5)
    small = newest[None]["trace"] / newest[None]["rows"]
    assert all(abs(e["grad_sq"]) < small for e in newest.values())  # with 16 rows nearly all noise


def test_every_sixteenth_step_by_default(simulated: Callable[..., Run]) -> None:
    run = simulated(**BSP, **TWO, **steps(33))
    assert [e["step"] for e in noise_of(run, "a")] == [16, 32]
    assert [e["step"] for e in noise_of(run, None)] == [16, 32]


@pytest.mark.parametrize(
    ("sections", "who"),
    [
        (BSP, {None}),  # one worker per region: only together
        (TWO, {"a", "b"}),  # sma: regions hold different models
        (TWO | {"strategy": {"kind": "bsp", "weights": "uniform"}}, {"a", "b"}),
        (TWO | BSP | {"codec": {"up": {"kind": "topk"}}}, {"a", "b"}),
        (TWO | BSP | {"codec": {"down": {"kind": "fp16"}}}, {"a", "b", None}),
        ({"strategy": {"kind": "halos"} | LEARNS["halos"]["strategy"]} | TWO, set()),
        (TWO | {"strategy": {"kind": "asgd"}, "train": BASE["train"] | {"mode": "async"}}, set()),
        ({"regions": [{"name": "a", "workers": 3}]}, {"a"}),
    ],
)
def test_who_can_measure(
    sections: dict[str, object],
    who: set[str | None],
    simulated: Callable[..., Run],
    often: None,
) -> None:
    assert whom(simulated(**({"train": BASE["train"] | {"steps": 4}} | sections))) == who


def test_measuring_changes_no_bit(
    simulated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = BSP | {"regions": [{"name": "a", "workers": 2, "ps_shards": 3}, {"name": "b"}]}
    digests = []
    for every in (1, 10**9):
        monkeypatch.setattr(region_noise, "NOISE_EVERY", every)
        digests.append(simulated(**sections, **steps(6)).digests())
    assert digests[0] == digests[1]


def test_a_resumed_run_goes_on_counting(often: None, data_dir: Path) -> None:
    config = experiment(**BSP, **TWO, **steps(8))
    whole = Run(config, data_dir)
    whole.world.checkpoint_at(2.5, 1)
    whole.go()
    resumed = Run(config, data_dir)
    resumed.world.restore(whole.world.checkpoints[1])
    resumed.go()
    for name in ("a", "b", None):
        after = [e.fields for e in noise_of(resumed, name)]
        assert 0 < len(after) < 4
        assert after == [e.fields for e in noise_of(whole, name)[-len(after) :]]


def test_the_summary_has_the_newest(simulated: Callable[..., Run], often: None) -> None:
    run = simulated(**BSP, **TWO, **steps(4))
    start = Event(
        "run_started",
        0.0,
        {"regions": ["a", "b"], "strategy": "bsp", "seed": 0, "simulated": True},
    )
    noise = summarise([start, *run.events]).noise
    newest = noise_of(run, None)[-1]
    assert noise is not None
    assert (noise["grad_sq"], noise["trace"]) == (newest["grad_sq"], newest["trace"])
