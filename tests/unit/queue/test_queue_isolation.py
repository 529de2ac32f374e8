"""What one job of a queue has is no other job's: run directories, submissions, stop requests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from queue_support import SimQueue, job, queue_config, sim_queue

from geo_ray.job import rundir
from geo_ray.job.queued.tree import run_of
from geo_ray.queue.actions import AskStop, Submit, is_submission_of, submission_name
from geo_ray.queue.state import job_id
from geo_ray.runtime.control import stop_requests
from geo_ray.runtime.queue.job_server import QueueJobServer, SubmissionTold
from geo_ray.runtime.queue.world import RayQueueWorld
from tests.job_support import experiment


class FakeServer(QueueJobServer):
    """A job server that runs whatever it is given, for ever."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", 1.0)
        self.there: dict[str, SubmissionTold] = {}

    def submissions(self) -> dict[str, SubmissionTold]:
        return self.there


def world_of(queue: SimQueue, monkeypatch: pytest.MonkeyPatch) -> tuple[RayQueueWorld, FakeServer]:
    room = {name: (0.0, 8.0) for name in queue.config.regions}
    monkeypatch.setattr("geo_ray.runtime.queue.world.room_of", lambda _: room)
    server = FakeServer()
    return RayQueueWorld(queue.config, server), server


def made_run(place: str) -> Path:
    """The directory of a run that the first attempt of a job has made."""
    path = Path(place)
    plain = experiment()
    run = plain.run.model_copy(update={"dir": str(path.parent), "again": "resume"})
    return rundir.create(
        plain.model_copy(update={"name": path.name, "run": run}), path.parent, exact=True
    ).path


def test_a_job_is_stopped_in_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = sim_queue(tmp_path, runs=str(tmp_path / "runs"))
    queue.submit("red", job("bert"))
    queue.submit("blue", job("bert-2", ("eu",)))
    queue.tick()
    jobs = queue.state.jobs
    places = {name: run_of(queue.config, each.id) for name, each in jobs.items()}
    runs = {name: made_run(place) for name, place in places.items()}
    world, server = world_of(queue, monkeypatch)
    for name, each in jobs.items():
        assert each.attempt is not None
        server.there[submission_name("q", each.id, each.attempt.number)] = SubmissionTold(False)
        assert runs[name].name == each.id
    world.see(queue.state, 1.0)
    world.act(AskStop("bert"))
    assert stop_requests.take(runs["bert"])
    assert not stop_requests.take(runs["bert-2"])


def test_ids_depend_on_the_queue_and_not_on_what_a_tenant_says(tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        queue = sim_queue(tmp_path / str(number))
        queue.submit("red", job("a"))
        queue.tick()
        queue.tick()
        ids.append(queue.state.jobs["a"].id)
        submitted = [each for each in queue.world.acts if isinstance(each, Submit)]
        assert [each.id for each in submitted] == ids[-1:]
    assert ids[0] != ids[1], "a queue that is made again does not find the runs of the one before"
    assert job_id("a", "x", 1) != job_id("a", "x", 2)


def test_submissions_of_a_queue_whose_name_begins_alike_are_not_its() -> None:
    mine = submission_name("a", job_id("job", "x", 1), 1)
    other = submission_name("a.b", job_id("job", "x", 1), 1)
    assert is_submission_of("a", mine)
    assert is_submission_of("a.b", other)
    assert not is_submission_of("a", other)
    assert not is_submission_of("a", "geoq-a.user-made")


def test_the_run_directory_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.sep)
    assert run_of(queue_config(runs="s3://b/runs"), "a.1") == "s3://b/runs/q/a.1"
    assert run_of(queue_config(runs="runs"), "a.1") == "/runs/q/a.1"
