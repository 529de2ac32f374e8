"""The best model of real runs: kept by the worker that evaluated it, also across a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.api.run import open_run
from geo_ray.base.errors import ConfigError
from geo_ray.runs import directory
from geo_ray.telemetry.events import Event
from tests.support.best_support import earliest_best, metrics_of
from tests.support.train_support import events_of, experiment_of, simulate, train

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(900),  # actors take long to start beside other work
]

KEEP = {"metric": "accuracy", "mode": "max"}
REGIONS = [{"name": "us-east", "ps_shards": 2}, {"name": "eu-west"}]
GETS_WORSE = {"kind": "momentum", "lr": 0.4}


class CutOffError(Exception):
    """Ends a run as a lost driver does: without a checkpoint."""


@pytest.mark.slow
def test_the_best_survives_a_resume_from_an_older_checkpoint(tmp_path: Path) -> None:
    config = experiment_of(
        tmp_path,
        regions=REGIONS,
        strategy={"kind": "bsp"},
        train={"steps": 14, "eval_every": 2, "step_timeout_s": 60, "keep_best": KEEP},
        emulate={"link": {"rate_mbps": 100, "delay_s": 0.005}, "step_s": 0.1},
        checkpoint={"every_s": 0.3},
    )
    wanted = simulate(config, tmp_path)
    run, seen = directory.create(config, tmp_path), list[Event]()

    def cut(event: Event) -> None:
        seen.append(event)
        saved = [e for e in seen if e.kind == "checkpoint"]
        if event.kind == "best_kept" and saved and saved[-1]["step"] < event["step"]:
            raise CutOffError

    with pytest.raises(CutOffError):
        train(config, tmp_path, begun=run, sink=cut)
    before = open_run(run.path)
    kept = seen[-1]
    assert before.summary.best.step == kept["step"]
    bits = before.best_path.read_bytes()
    assert metrics_of(run.path, None) == pytest.approx(kept["metrics"])

    first: list[tuple[Event, bytes]] = []

    def watch(event: Event) -> None:
        if event.kind in {"best_kept", "eval"} and not first:
            first.append((event, before.best_path.read_bytes()))

    done = train(config, tmp_path, begun=run, resume=True, sink=watch)
    ((event, found),) = first
    assert (event.kind, event["step"], found) == ("best_kept", kept["step"], bits)
    assert done.summary.best == wanted.summary.best
    assert run.best_model.read_bytes() == wanted.run.best_model.read_bytes()
    assert not (run.path / "candidates").exists()


@pytest.mark.slow
def test_regions_that_differ_keep_what_the_averagers_has_evaluated(tmp_path: Path) -> None:
    config = experiment_of(
        tmp_path,
        regions=[{"name": "us-east"}, {"name": "eu-west", "ps_shards": 2}],
        averager={"region": "eu-west"},
        strategy={"kind": "asgd_ga", "interval": 2},
        optimizer=GETS_WORSE,
        train={"steps": 12, "eval_every": 2, "step_timeout_s": 60, "keep_best": KEEP},
    )
    done = train(config, tmp_path)
    best = done.summary.best
    assert best.region == "eu-west"
    assert (best.value, best.step) == earliest_best(done.events, "eu-west")
    assert metrics_of(done.run.path, "eu-west") == pytest.approx(best.metrics)
    assert [e["value"] for e in done.of("best_kept")] == sorted(
        {e["value"] for e in done.of("best_kept")}
    )
    assert not done.of("best_failed")


@pytest.mark.slow
def test_outer_parameters_and_the_target(tmp_path: Path) -> None:
    """Evaluations of a run that a target ends count to the last one."""
    target = {"metric": "accuracy", "value": 0.0, "direction": "at_least"}
    train_ = {"steps": 40, "eval_every": 2, "step_timeout_s": 60}
    config = experiment_of(
        tmp_path,
        regions=REGIONS,
        strategy={"kind": "diloco", "interval": 4},
        train=train_ | {"keep_best": KEEP, "target": target},
    )
    done = train(config, tmp_path)
    best = done.summary.best
    assert done.summary.steps < 40 and best.region is None
    assert [event["final"] for event in done.of("eval")][-1]
    assert (best.value, best.step) == earliest_best(done.events, None)
    assert metrics_of(done.run.path, None) == pytest.approx(best.metrics)


def test_an_unknown_metric_is_refused_before_anything_starts(tmp_path: Path) -> None:
    keep = {"metric": "acuracy", "mode": "max"}
    config = experiment_of(tmp_path, train={"steps": 4, "eval_every": 2, "keep_best": keep})
    run = directory.create(config, tmp_path)
    with pytest.raises(ConfigError, match="acuracy"):
        train(config, tmp_path, begun=run)
    assert not (run.path / "events.jsonl").exists() or not events_of(run.path)
