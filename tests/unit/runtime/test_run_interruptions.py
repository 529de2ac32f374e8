"""What ends a run early, and how the end is requested."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import (
    HeadLostError,
    InterruptedRunError,
    RegionLostError,
    RunDirectoryError,
)
from geo_ray.ray_cluster.connect import HeadState, HeadWatch, patience_s
from geo_ray.runs import requests
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.remote import REQUESTS
from geo_ray.runs.requests import Interruption, take_member_requests
from geo_ray.runtime import run_actor
from geo_ray.runtime.run_actor import SupervisedLauncher, WatchedProgress
from geo_ray.runtime.run_order import Resumption, RunEnd, RunOrder
from geo_ray.runtime.supervisor import RestartBudget, WatcherLiveness, supervisor_name
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, EventTail, read_events
from geo_ray.telemetry.summary import summarise
from tests.support.observe_support import Row, started


def test_a_run_without_a_watcher_ends_after_a_while() -> None:
    watched = WatcherLiveness(60.0, 100.0)
    assert not watched.is_over(159.9)
    watched.saw_watcher(150.0)
    watched.saw_watcher(140.0)  # told late
    assert not watched.is_over(209.9) and watched.is_over(210.0)
    assert not WatcherLiveness(None, 0.0).is_over(1e9)


def test_an_unresponsive_head_is_waited_for_and_then_given_up() -> None:
    watch = HeadWatch(60.0)
    assert watch.see(0.0, answers=True) is HeadState.THERE
    assert watch.see(3.0, answers=False) is HeadState.THERE  # once is nothing
    assert watch.see(5.0, answers=False) is HeadState.UNRESPONSIVE
    assert watch.see(20.0, answers=True) is HeadState.THERE
    assert watch.see(49.9, answers=False) is HeadState.UNRESPONSIVE
    assert watch.see(50.0, answers=False) is HeadState.GONE  # half of what Ray waits


def test_a_head_that_never_answered_is_not_given_up() -> None:
    watch = HeadWatch(60.0)
    assert watch.see(1000.0, answers=False) is HeadState.THERE


@pytest.mark.parametrize(
    ("text", "expected_s"), [(None, 60.0), ("600", 600.0), ("0", 1.0), ("long", 60.0)]
)
def test_rays_patience_is_the_node_s_setting(text: str | None, expected_s: float) -> None:
    told = {} if text is None else {"RAY_gcs_rpc_server_reconnect_timeout_s": text}
    assert patience_s(told) == expected_s


def test_a_wish_to_stop_is_taken_once_and_is_no_members_request(tmp_path: Path) -> None:
    assert not requests.take_stop_request(tmp_path)
    requests.request_stop(tmp_path)
    requests.request_stop(tmp_path)
    assert take_member_requests(tmp_path) == [] and (tmp_path / REQUESTS / "stop").exists()
    assert requests.take_stop_request(tmp_path) and not requests.take_stop_request(tmp_path)
    requests.request_stop(tmp_path)
    requests.forget_stop_request(tmp_path)
    assert not requests.take_stop_request(tmp_path)


def test_an_unused_wish_is_reported(tmp_path: Path) -> None:
    (tmp_path / REQUESTS).write_text("in the way")
    with pytest.raises(RunDirectoryError):
        requests.request_stop(tmp_path)


def test_the_first_reason_to_stop_counts() -> None:
    wish = Interruption()
    assert not wish.is_set()
    wish.set(HeadLostError("the head is gone"))
    wish.set()
    assert wish.is_set() and isinstance(wish.why, HeadLostError)
    plain = Interruption()
    plain.set()
    assert isinstance(plain.why, InterruptedRunError)


def test_a_run_has_one_supervisor_however_its_place_is_written(tmp_path: Path) -> None:
    def name(path: Path, address: str | None = None) -> str:
        return supervisor_name(RunDirectory(path, tmp_path, address))

    (tmp_path / "run").mkdir()
    assert name(tmp_path / "run") == name(tmp_path / "run" / ".." / "run")
    assert name(tmp_path / "run") != name(tmp_path)
    assert name(tmp_path / "a", "s3://b/run") == name(tmp_path / "c", "s3://b/run")


def test_a_dead_run_actor_is_restarted_until_it_never_trains() -> None:
    budget = RestartBudget()
    assert [budget.take(has_trained=True) for _ in range(20)] == [True] * 20
    assert not budget.take(has_trained=True)
    starts = RestartBudget()
    assert [starts.take(has_trained=False) for _ in range(3)] == [True, True, False]
    mixed = RestartBudget()
    assert all(mixed.take(has_trained=trained) for trained in (False, False, True, False, False))


def joined(region: str) -> Row:
    about = {"view": 2, "round": 1, "step": 4, "bytes": 8, "took_s": 0.5}
    return ("region_joined", 1.0, {"region": region, **about})


def log_of(directory: Path, rows: list[Row]) -> Path:
    """The log of a run, with these events at its end."""
    with EventLog(directory / EVENTS_FILE) as log:
        for kind, t_s, fields in rows:
            log.write(kind, t_s, **fields)
    return directory / EVENTS_FILE


def drained(cause: str, region: str = "eu") -> Row:
    return ("region_drained", 2.0, {"region": region, "cause": cause})


@pytest.mark.parametrize(
    ("rows", "away"),
    [
        ([started(regions=["us"])], {"eu", "asia"}),
        ([started(regions=["us"]), joined("eu")], {"asia"}),
        ([started(regions=["us", "eu"])], {"asia"}),
        ([started(regions=["us", "eu"]), drained("asked")], {"eu", "asia"}),
        ([started(regions=["us"]), joined("eu"), drained("notice")], {"asia"}),  # it comes back
        ([started(regions=["us"]), joined("eu"), started(regions=["us"])], {"eu", "asia"}),
        ([started(regions=["us", "eu"]), drained("asked"), joined("eu")], {"asia"}),
        # It was not away when the run was resumed, and was asked to leave since.
        ([started(regions=["us", "eu"]), drained("asked", "us")], {"us", "asia"}),
    ],
)
def test_another_run_actor_excludes_regions_that_have_not_joined_since(
    rows: list[Row], away: set[str], tmp_path: Path
) -> None:
    told = Resumption(checkpoint=3, waits=True, away=frozenset({"eu", "asia"}))
    log = log_of(tmp_path, rows)
    assert told.again(EventTail(log)) == Resumption(away=frozenset(away))
    asked = away - {"asia"} if drained("asked") in rows or drained("asked", "us") in rows else set()
    assert Resumption().again(EventTail(log)) == Resumption(away=frozenset(asked))


@pytest.mark.parametrize(
    "attached", [[], [("run_actor_attached", 3.0, {"token": 2, "downtime_s": 1})]]
)
def test_another_run_actor_repeats_an_order_that_had_not_begun(
    attached: list[Row], tmp_path: Path
) -> None:
    """The log describes the time before the resume: its members do not matter."""
    log = log_of(tmp_path, [started(regions=["us", "eu"]), drained("asked"), *attached])
    told = Resumption(5, away=frozenset({"us"}), log_bytes=log.stat().st_size)
    assert told.again(EventTail(log)) == told
    assert Resumption(log_bytes=log.stat().st_size).again(EventTail(log)).checkpoint is None

    log_of(tmp_path, [started(regions=["eu"])])
    assert told.again(EventTail(log)) == Resumption(away=frozenset({"us"}))


FAILED: Row = (
    "run_failed",
    9.0,
    {"code": "REGION_LOST", "message": "region 'eu' is lost", "fix": "Look at it."},
)


def test_a_run_actor_that_died_after_recording_the_end_does_not_restart(tmp_path: Path) -> None:
    log = log_of(tmp_path, [started(regions=["us"]), FAILED])
    end = Resumption().end_noted(EventTail(log))
    assert end is not None and isinstance(end.error, RegionLostError)
    assert (end.error.message, end.error.fix) == ("region 'eu' is lost", "Look at it.")

    resumed = Resumption(log_bytes=log.stat().st_size)
    assert resumed.end_noted(EventTail(log)) is None, "that end was before the run was resumed"
    log_of(tmp_path, [started(regions=["us"])])
    assert resumed.end_noted(EventTail(log)) is None
    summary = summarise(read_events(log), startup_s=1.0)
    about = {"summary": summary.model_dump(), "digests": {}}
    log_of(tmp_path, [("run_finished", 12.0, about)])
    assert resumed.end_noted(EventTail(log)) == RunEnd(summary)


class Supervisor:
    """Stands for the handle of the actor; each of its methods can be called."""

    def __getattr__(self, name: str) -> Supervisor:
        return self

    def __call__(self, *arguments: Any) -> None:
        """Answer nothing."""


def test_a_request_to_end_the_run_ends_a_wait_for_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Placing a run can take minutes; the end itself asks the supervisor, too."""
    progress = WatchedProgress(RunOrder.__new__(RunOrder))
    answers = iter([["us"], [], [], [], ["eu"]])

    def collect(calls: Any, timeout_s: float, waits: Any) -> Any:
        waits(0, 1, ["supervisor"])
        return {"supervisor": next(answers)}

    monkeypatch.setattr(run_actor, "collect", collect)
    launcher: Any = SupervisedLauncher(Supervisor(), progress)
    assert launcher.place([], 60.0) == ["us"]
    progress.end_error = KeyboardInterrupt()
    launcher.clear()  # at the end of a run, which may have finished
    with ThreadPoolExecutor(1) as other:  # it does not end the run for the thread that must
        assert other.submit(launcher.place, [], 60.0).result() == []
    with pytest.raises(KeyboardInterrupt):
        launcher.place([], 60.0)
    launcher.clear()
    assert launcher.place([], 60.0) == ["eu"]
