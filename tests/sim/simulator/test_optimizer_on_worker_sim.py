"""Simulated workers that keep parameters and optimizer, with every strategy that allows it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from geo_ray.strategies.registry import STRATEGIES
from geo_ray.telemetry.events import Event
from tests.support.world_support import Run, check_ended, experiment, of_kind

KINDS = sorted(k for k, each in STRATEGIES.items() if each().traits.region.local_optimizer)
ROUNDS = [
    kind
    for kind in KINDS
    if STRATEGIES[kind]().traits.in_rounds
    and STRATEGIES[kind]().traits.exchange.blocking == "always"
]
"""Strategies whose results do not depend on times."""
STEPS = 14
ADAMW = {"kind": "adamw", "lr": 0.01, "schedule": {"kind": "linear", "warmup_steps": 3}}


def run_of(kind: str, data_dir: Path, on: str, **train: Any) -> Run:
    sections = (
        {"optimizer": ADAMW}
        | of_kind(kind)
        | {
            "regions": [{"name": "a"}, {"name": "b", "ps_shards": 1}, {"name": "c"}],
            "train": {"steps": STEPS, "eval_every": 4, "optimizer_on": on} | train,
            "emulate": {
                "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.5},
                "link": {"rate_mbps": 20, "delay_s": 0.04},
            },
            "checkpoint": {"every_s": None},
        }
    )
    return Run(experiment(**sections), data_dir)


def test_there_are_such_strategies() -> None:
    assert {"sma", "diloco", "sparseloco", "muloco"} <= set(ROUNDS)
    assert {"ama", "diloco_streaming", "decoupled", "nbsync"} <= set(KINDS) - set(ROUNDS)


def without_lan(kind: str, data_dir: Path, on: str, **train: Any) -> Run:
    return Run(run_of(kind, data_dir, on, **train).config, data_dir, lan_s=0.0)


@pytest.mark.parametrize("kind", ROUNDS)
def test_rounds_have_the_bits_losses_and_times_of_the_server(data_dir: Path, kind: str) -> None:
    """Times are equal but for messages within regions."""
    own, servers = (without_lan(kind, data_dir, on).go() for on in ("worker", "server"))
    assert own.digests() == servers.digests()
    assert own.result.seconds == pytest.approx(servers.result.seconds, abs=1e-9)
    for name in ("step", "eval", "exchange"):
        for region in own.world.regions:  # steps are known when they are reported
            found, expected = ([rounded(e) for e in r.of(name, region)] for r in (own, servers))
            assert found == expected
    assert run_of(kind, data_dir, "worker").go().digests() == own.digests()


def rounded(event: Event) -> dict[str, Any]:
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in event.fields.items()}


def messages(
    steps: int,
    step_s: float,
    *,
    every: int | None = None,
    evals: int = 0,
    states: int = 100,
    are_several: bool = False,
) -> int:
    """Messages between a worker and its server that training waits for, by the guide."""
    found, step, unsaved = 1, 0, 0  # the first rows
    while step < steps:
        took_s, first = 0.0, step
        usually = int(1.0 // step_s) if first else 1
        while True:  # a run of steps until its report
            step, unsaved, took_s = step + 1, unsaved + 1, took_s + step_s
            exchanges = every is not None and step % every == 0
            needs_state = exchanges or step == steps or unsaved == states
            if needs_state or (evals and step % evals == 0):
                break
            if step - first >= usually if are_several else took_s >= 1.0:
                break
        found += 1  # the report
        if needs_state:
            found, unsaved = found + 2, 0  # a request for the state, and the state
        found += 1  # the answer, with new rows, or the last one, which ends the worker
    return found + (2 if are_several else 0)  # the optimizer's state at the end


@pytest.mark.parametrize("step_s", [0.0625, 0.375, 0.5, 2.0])
@pytest.mark.parametrize("limits", [{}, {"evals": 6}, {"states": 7}, {"evals": 9, "states": 4}])
def test_messages_of_a_single_region(data_dir: Path, step_s: float, limits: dict[str, int]) -> None:
    every = {"eval_every": limits.get("evals", 0), "state_every": limits.get("states", 100)}
    config = alone(data_dir, "worker", step_s, **every).config
    now, with_lan = (Run(config, data_dir, lan_s=s).go().result.seconds for s in (0.0, 0.001))
    assert round((with_lan - now) / 0.001) == messages(40, step_s, **limits)


@pytest.mark.parametrize("step_s", [0.0625, 0.375, 2.0])
@pytest.mark.parametrize("evals", [0, 5])
@pytest.mark.parametrize("workers", [1, 3])
def test_messages_of_regions_in_rounds(
    data_dir: Path, step_s: float, evals: int, workers: int
) -> None:
    sections = {
        "regions": [{"name": "a", "workers": workers}, {"name": "b", "workers": workers}],
        "optimizer": ADAMW,
        "strategy": {"kind": "diloco", "interval": 8},
        "train": {"steps": 40, "eval_every": evals, "optimizer_on": "worker"},
        "emulate": {"step_s": step_s, "link": {"rate_mbps": 20, "delay_s": 0.04}},
        "checkpoint": {"every_s": None},
    }
    config = experiment(**sections)
    now, with_lan = (Run(config, data_dir, lan_s=s).go().result.seconds for s in (0.0, 0.001))
    assert round((with_lan - now) / 0.001) == messages(
        40, step_s, every=8, evals=evals, are_several=workers > 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_ends_as_it_should(data_dir: Path, kind: str) -> None:
    check_ended(run_of(kind, data_dir, "worker").go())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ROUNDS)
def test_lost_workers_change_nothing(data_dir: Path, kind: str, seed: int) -> None:
    whole = run_of(kind, data_dir, "worker").go()
    run, draw = run_of(kind, data_dir, "worker", state_every=3 + seed), Random(f"{kind}/{seed}")
    for name in ("a", "b", "c"):
        now_s = 0.0
        while now_s < whole.result.seconds:
            now_s += draw.uniform(0.1, 0.7) * whole.result.seconds
            run.world.workers.at(now_s, name, 0, "lost")
            now_s += draw.choice((0.0, 0.05)) * whole.result.seconds
            run.world.workers.at(now_s, name, 0, "replaced")
    assert run.go().digests() == whole.digests()
    check_ended(run)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_from_where_it_was(data_dir: Path, kind: str, seed: int) -> None:
    whole = run_of(kind, data_dir, "worker").go()
    killed = run_of(kind, data_dir, "worker")
    when_s = Random(f"{kind}/{seed}").uniform(0.05, 0.9) * whole.result.seconds
    killed.world.checkpoint_at(when_s, 1)
    killed.go()
    cut = killed.world.checkpoints[1]
    assert cut.is_whole
    for on in ("worker", "server"):  # a checkpoint has the same content
        resumed = run_of(kind, data_dir, on)
        resumed.world.restore(cut)
        check_ended(resumed.go())
        if kind in ROUNDS:
            assert killed.digests() == whole.digests() == resumed.digests()


def alone(data_dir: Path, on: str, step_s: float, **train: Any) -> Run:
    sections: dict[str, Any] = {
        "regions": [{"name": "a"}],
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "train": {"steps": 40, "eval_every": 6, "optimizer_on": on} | train,
        "emulate": {"step_s": step_s},
        "checkpoint": {"every_s": None},
    }
    return Run(experiment(**sections), data_dir)


STOPS: dict[str, dict[str, Any]] = {
    "target": {"target": {"metric": "loss", "value": 2.3, "direction": "at_most"}},
    "patience": {"patience": 1, "keep_best": {"metric": "loss", "mode": "max"}},
}


@pytest.mark.parametrize("reason", STOPS)
@pytest.mark.parametrize(
    ("on", "step_s", "more"),
    [
        ("server", 0.3, 1),
        ("auto", 0.5, 2),  # a worker reports the steps of a second together
        ("worker", 0.3, 4),
        ("worker", 2.0, 1),
        ("worker", 0.125, 6),  # it reports before the next evaluation
    ],
)
def test_a_worker_stops_with_its_next_report(
    data_dir: Path, reason: str, on: str, step_s: float, more: int
) -> None:
    """The evaluation that ends the run is made before the first of the steps of a report."""
    run = alone(data_dir, on, step_s, **STOPS[reason]).go()
    check_ended(run)
    (stop,) = run.of("stop_requested")
    assert stop["reason"] == reason
    evaluated = [e["step"] for e in run.of("eval", "a") if not e["final"]][-1]
    steps = run.world.regions["a"].server.version
    assert evaluated < 40 - more and steps == evaluated + more
    assert run.of("step")[-1]["step"] == steps
    assert run.digests() == alone(data_dir, "server", step_s, steps=steps).go().digests()


@pytest.mark.parametrize("reason", STOPS)
def test_regions_stop_after_the_same_step_as_with_the_server(data_dir: Path, reason: str) -> None:
    """The evaluations are made within rounds."""
    sections = {
        "eval_every": 3,
        "steps": 60,
    } | STOPS[reason]
    own, servers = (
        without_lan("diloco", data_dir, on, **sections).go() for on in ("worker", "server")
    )
    for run in (own, servers):
        check_ended(run)
        assert run.of("stop_requested")[0]["reason"] == reason
    assert own.digests() == servers.digests()
    assert own.result.seconds == pytest.approx(servers.result.seconds, abs=1e-9)
    assert own.of("step")[-1]["step"] == servers.of("step")[-1]["step"] < 60


def test_a_worker_leaves_with_its_next_report(data_dir: Path) -> None:
    """Four steps of 0.3 s are reported together; the notice comes within the second one."""
    whole = alone(data_dir, "worker", 0.3).go()
    run = alone(data_dir, "worker", 0.3)
    run.world.workers.at(0.4, "a", 0, "drained")
    run.world.workers.at(5.0, "a", 0, "replaced")
    check_ended(run.go())
    assert [e["step"] for e in run.of("step") if e.t_s < 5.0] == [1, 2, 3, 4]
    assert run.digests() == whole.digests()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["ama", "diloco_eager"])
def test_an_evaluation_after_some_rows_is_due_when_an_answer_arrives(
    data_dir: Path, kind: str, workers: int
) -> None:
    """A worker has its rows when the answer is merged that says how many were trained on."""
    sections = of_kind(kind) | {
        "regions": [{"name": "a", "workers": workers}, {"name": "b", "workers": workers}],
        "train": {"steps": 60, "eval_every": 5, "optimizer_on": "worker", "count": "total"},
        "emulate": {
            "step_s_by_region": {"a": 0.1, "b": 0.13},
            "link": {"rate_mbps": 20, "delay_s": 0.2},
        },
        "checkpoint": {"every_s": None},
    }
    run = Run(experiment(**sections), data_dir).go()
    check_ended(run)
    assert len(run.of("eval", "a")) > 1


@pytest.mark.parametrize(("step_s", "steps"), [(0.25, 4), (2.0, 1)])
def test_an_evaluation_is_owed_if_its_worker_is_lost_in_a_run(
    data_dir: Path, step_s: float, steps: int
) -> None:
    """The worker is lost before it gets the message with the evaluation after step 6."""
    lan_s = 0.02
    sections = {
        "regions": [{"name": "a", "workers": 2}, {"name": "b", "workers": 2}],
        "strategy": {"kind": "diloco", "interval": 12},
        "train": {"steps": 24, "eval_every": 6, "optimizer_on": "worker"},
        "emulate": {"step_s": step_s, "link": {"rate_mbps": 20, "delay_s": 0.04}},
        "checkpoint": {"every_s": None},
    }
    config = experiment(**sections)
    whole, run = (Run(config, data_dir, lan_s=lan_s) for _ in range(2))
    first = whole.go().of("eval", "a")[0]
    assert first["step"] == 6
    run.world.workers.at(first.t_s - lan_s / 2, "a", 0, "lost")
    check_ended(run.go())
    assert [e["step"] for e in run.of("eval", "a")] == [6 + steps, 12, 18, 24]
