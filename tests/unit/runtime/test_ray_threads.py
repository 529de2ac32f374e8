"""Threads that call Ray have ended before Ray is let go of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from geo_ray.base.errors import RegionLostError
from geo_ray.ray_cluster import placement
from geo_ray.ray_cluster.calls import RayThreads, check_not_closing, collect, is_ray_thread
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.ray_cluster.placement import place

LONG_S = 600.0


def test_requested_work_runs_on_a_separate_thread() -> None:
    threads = RayThreads()
    assert threads.submit("one", is_ray_thread).result(10.0) and not is_ray_thread()
    failed = threads.submit("two", lambda: 1 // 0)
    assert isinstance(failed.exception(10.0), ZeroDivisionError)
    threads.close()


def test_close_waits_for_work_and_for_callbacks_of_its_result() -> None:
    threads, may_end, done = RayThreads(), threading.Event(), []
    found = threads.submit("slow", lambda: may_end.wait(LONG_S))
    found.add_done_callback(lambda _: done.append("killed what it had made"))
    closing = threading.Thread(target=threads.close)
    closing.start()
    while not threads._is_closing.is_set():
        pass
    assert closing.is_alive() and not done
    may_end.set()
    closing.join(10.0)
    assert not closing.is_alive() and done and found.result(0.0)


def test_a_closed_one_starts_nothing_and_may_be_closed_again() -> None:
    threads = RayThreads()
    threads.close()
    late = threads.submit("late", lambda: pytest.fail("it was started"))
    assert isinstance(late.exception(0.0), RegionLostError)
    threads.close()


def test_a_thread_that_does_not_end_is_named_and_abandoned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, may_end = RayThreads(), threading.Event()
    threads.submit("stuck", lambda: may_end.wait(LONG_S))
    threads.close(0.0)
    assert "ray-stuck does not end" in caplog.text
    may_end.set()
    threads.close()


def test_a_wait_for_actors_ends_when_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def wait(refs: Sequence[Any], **_: object) -> tuple[list[Any], list[Any]]:
        asked.set()
        return [], list(refs)

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda refs, **_: list(refs))
    threads = RayThreads()
    found = threads.submit("join", lambda: collect({"eu/ps": object()}, LONG_S))
    assert asked.wait(60.0)
    threads.close()
    assert isinstance(found.exception(0.0), RegionLostError)


def test_a_wait_for_a_place_ends_when_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, removed = threading.Event(), []

    class Group:
        id = b"group"

        def wait(self, timeout_seconds: int) -> bool:
            asked.set()
            assert timeout_seconds <= 1
            return False

    monkeypatch.setattr(placement, "_ask", lambda demand, bundles: Group())
    monkeypatch.setattr(placement, "remove", removed.append)
    threads, demand = RayThreads(), RegionDemand("eu", (Bundle("ps"),))
    found = threads.submit("join", lambda: place([demand], LONG_S))
    assert asked.wait(60.0)
    threads.close()
    assert isinstance(found.exception(0.0), RegionLostError) and len(removed) == 1


def test_other_threads_are_not_concerned() -> None:
    threads = RayThreads()
    threads.close()
    check_not_closing()
