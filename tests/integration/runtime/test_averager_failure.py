"""Failures in the averager reach every region and the controller, without a wait."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import AveragerFailedError, GeoRayError, StalledError
from geo_ray.runtime.exchange import direct, upload_scheduling
from geo_ray.runtime.exchange.upload_scheduling import UploadCoordinator
from geo_ray.runtime.policies import STUCK_S, RunLimits, RunPolicy
from geo_ray.strategies.decoupled import Decoupled
from geo_ray.strategies.sma import Sma
from tests.support.region_support import InProcess, WorkerThread, eventually, experiment_of

REGIONS = [{"name": name, "workers": 1} for name in ("asia", "eu", "us")]
AVERAGER = {"region": "eu"}
PATHS: dict[str, dict[str, Any]] = {
    "direct": {"averager": AVERAGER},
    "shards": {"regions": [region | {"ps_shards": 2} for region in REGIONS]},
    "transfers": {
        "averager": AVERAGER,
        "strategy": {"kind": "asgd_ga", "interval": 2},
        "transfers": {"small_bytes": 0, "averager_mbps": 100.0},
    },
    "standby": {"averager": AVERAGER | {"standby": "us"}},
    "binary": {"averager": AVERAGER, "overlay": {"kind": "binary"}},
    "ring": {"averager": AVERAGER, "overlay": {"kind": "ring"}},
}


def start_all(world: InProcess) -> list[WorkerThread]:
    return [site.start(0) for site in world.sites.values()]


def check_failed(world: InProcess, workers: list[WorkerThread], match: str) -> None:
    """Every worker, every region and every bridge has the one error."""
    for worker in workers:
        with pytest.raises(AveragerFailedError, match=match):
            worker.result()
    for name, site in world.sites.items():
        assert site.bridge is not None
        for status in (site.primary.status(), site.bridge.status()):
            assert isinstance(status["failure"], AveragerFailedError), name
    told = {name: site.primary.status()["failure"] for name, site in world.sites.items()}
    limits = RunLimits(max_worker_restarts=0, max_refused_steps=3, save_every_s=None)
    with pytest.raises(AveragerFailedError, match=match):
        RunPolicy(limits, 0.0).regions_lost({}, told, {"eu": True}, ())


@pytest.mark.parametrize("path", PATHS)
def test_an_error_in_a_strategy_ends_every_region(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the way of the updates; the traceback with the strategy's line is in the log."""
    config = experiment_of(**({"regions": REGIONS} | PATHS[path]))
    kind = type(config.strategy)
    before = kind.on_update

    def on_update(self: Any, averager: Any, update: Any) -> Any:
        return before(self, averager, update) if averager.version < 1 else [][averager.version]

    monkeypatch.setattr(kind, "on_update", on_update)
    with caplog.at_level(logging.ERROR), InProcess(config, tmp_path) as world:
        workers = start_all(world)
        check_failed(world, workers, r"' failed in the averager: IndexError.*\.py:\d+\)")
    traces = [record.exc_text or "" for record in caplog.records]
    assert any("in on_update" in text and "IndexError" in text for text in traces)


def test_an_error_in_a_handler_ends_every_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update counts as received by then and would not be sent again."""

    def broken(meta: Any, payload: Any) -> Any:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(direct, "read_update", broken)
    config = experiment_of(regions=REGIONS, averager=AVERAGER)
    with InProcess(config, tmp_path) as world:
        workers = start_all(world)
        check_failed(world, workers, r"bridge of region 'eu' failed at 'update' of region .*luck")


def test_an_error_in_a_thread_of_a_stage_ends_every_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: UploadCoordinator) -> None:
        raise ZeroDivisionError("no time")

    monkeypatch.setattr(UploadCoordinator, "_keep_time", broken)
    assert upload_scheduling.UploadCoordinator is UploadCoordinator
    config = experiment_of(**({"regions": REGIONS} | PATHS["transfers"]))
    with InProcess(config, tmp_path) as world:
        check_failed(world, start_all(world), "failed at the upload schedule")


def test_an_error_in_a_woken_strategy_ends_every_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update is being handled then, and no region would be refused anything."""

    def on_wake(self: Decoupled, averager: Any) -> Any:
        raise ZeroDivisionError("overslept")

    monkeypatch.setattr(Decoupled, "on_wake", on_wake)
    strategy = {"kind": "decoupled", "interval": 4, "fragments": 2, "quorum": 1, "grace_s": 0.05}
    train = {"steps": 400, "eval_every": 0}
    config = experiment_of(regions=REGIONS, averager=AVERAGER, strategy=strategy, train=train)
    with InProcess(config, tmp_path) as world:
        check_failed(world, start_all(world), "'decoupled' failed in the averager: .*overslept")


def test_regions_without_a_possible_answer_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the processes tell the controller is enough to know that nothing can happen."""
    before = Sma.on_update

    def on_update(self: Sma, averager: Any, update: Any) -> Any:
        answers = before(self, averager, update)
        return answers if averager.version < 2 else []

    monkeypatch.setattr(Sma, "on_update", on_update)
    config = experiment_of(regions=REGIONS, averager=AVERAGER)
    with InProcess(config, tmp_path) as world:
        workers = start_all(world)
        policy = RunPolicy(RunLimits(0, 3, None), 0.0)
        bridge = world.sites["eu"].bridge
        assert bridge is not None

        def seen() -> tuple[dict[str, Any], dict[str, int]] | None:
            still = {n: s.primary.status()["blocked_on"] for n, s in world.sites.items()}
            unanswered = bridge.status()["open"]
            if unanswered is None or None in still.values():  # the averager or a region is at work
                return None
            return (still, unanswered) if len(unanswered) == 3 else None

        still, unanswered = eventually(seen, "a standstill")
        policy.check_progress(1.0, still, unanswered)
        policy.check_progress(1.0 + STUCK_S - 0.1, still, unanswered)
        with pytest.raises(StalledError, match=r"'asia' \(update 2\), 'eu' \(update 2\)"):
            policy.check_progress(1.0 + STUCK_S, still, unanswered)
    for worker in workers:
        with pytest.raises(GeoRayError):  # the bridge is closing
            worker.result()
