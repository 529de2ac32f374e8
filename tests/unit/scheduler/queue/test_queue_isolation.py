"""Isolation of jobs: run directories, submissions and stop requests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from ray.dashboard.modules.job.pydantic_models import JobDetails, JobType
from ray.job_submission import JobStatus

from geo_ray.base.errors import ClusterError, InvariantError, QueueRequestError, RunDirectoryError
from geo_ray.runs import directory, requests
from geo_ray.runs.lease import Unfenced
from geo_ray.runs.status import StatusReader
from geo_ray.scheduler.policies.fifo import FifoPolicy
from geo_ray.scheduler.policy import SlotDecision, SlotView
from geo_ray.scheduler.queue.job_config import run_of
from geo_ray.scheduler.queue.job_server import (
    JobCode,
    QueueJobServer,
    SubmissionReport,
    submission_report,
)
from geo_ray.scheduler.queue.journal import QueueJournal
from geo_ray.scheduler.queue.loop import (
    Action,
    AskStop,
    QueueLoop,
    Submit,
    is_submission_of,
    submission_name,
)
from geo_ray.scheduler.queue.model import cluster_of
from geo_ray.scheduler.queue.report import report_of
from geo_ray.scheduler.queue.state import job_id, state_of
from geo_ray.scheduler.queue.world import RayQueueWorld
from geo_ray.telemetry.events import conform
from tests.support.job_support import experiment
from tests.support.queue_support import SimQueue, job, queue_config, sim_queue


class FakeServer(QueueJobServer):
    """A job server whose submissions run forever."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", 1.0)
        self.there: dict[str, SubmissionReport] = {}

    def submissions(self) -> dict[str, SubmissionReport]:
        return self.there

    def submit(
        self, name: str, tree: Mapping[str, JsonValue], code: JobCode | None, owner: str
    ) -> None:
        self.there[name] = SubmissionReport(False)


def world_of(queue: SimQueue, monkeypatch: pytest.MonkeyPatch) -> tuple[RayQueueWorld, FakeServer]:
    capacity = dict.fromkeys(queue.config.regions, (0.0, 8.0))
    monkeypatch.setattr("geo_ray.scheduler.queue.world.capacity_of", lambda _: capacity)
    server = FakeServer()
    return RayQueueWorld(queue.config, server), server


def made_run(place: str) -> Path:
    """Create the run directory of a job's first attempt."""
    path = Path(place)
    plain = experiment()
    run = plain.run.model_copy(update={"dir": str(path.parent), "again": "resume"})
    return directory.create(
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
        server.there[submission_name("q", each.id, each.attempt.number)] = SubmissionReport(False)
        assert runs[name].name == each.id
    world.see(queue.state, 1.0)
    world.act(AskStop("bert"))
    assert requests.take_stop_request(runs["bert"])
    assert not requests.take_stop_request(runs["bert-2"])


def test_ids_depend_on_the_queue_and_not_on_what_a_tenant_says(tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        queue = sim_queue(tmp_path / str(number))
        queue.queue_id = f"made-{number}"
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


# ---------------------------------------------------------------------- failures of one job


def write_events(run: Path, *rows: dict[str, object]) -> None:
    """Append arbitrary events to the log of a run."""
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


STARTED = {
    "t_s": 0.0,
    "kind": "run_started",
    "run": "x",
    "digest": "",
    "strategy": "bsp",
    "regions": ["us"],
    "task": "x",
    "seed": 0,
    "simulated": False,
}
EXCHANGE = {
    "t_s": 1.0,
    "kind": "exchange",
    "region": "us",
    "seq": 1,
    "start_s": 0.5,
    "bytes_sent": 1,
    "bytes_received": 1,
    "blocking": True,
    "staleness": 0,
    "round": 1,
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (EXCHANGE, {"bytes_before": ""}),
        (EXCHANGE, {"held_s": []}),
        (STARTED, {"startup_s": "soon"}),
        (STARTED, {"steps": 7}),
        (STARTED, {"codec": {"up": 1}}),
        (STARTED, {"averager": 3}),
    ],
)
def test_optional_fields_of_an_event_are_checked(
    kind: dict[str, object], change: dict[str, object]
) -> None:
    fields = {name: value for name, value in kind.items() if name not in ("t_s", "kind")}
    conform(str(kind["kind"]), 0.0, fields)
    with pytest.raises(InvariantError, match=next(iter(change))):
        conform(str(kind["kind"]), 0.0, fields | change)


def test_a_poisoned_log_is_its_jobs_problem_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = sim_queue(tmp_path, runs=str(tmp_path / "runs"))
    world, server = world_of(queue, monkeypatch)
    loop = QueueLoop(queue.config, queue.store, world, 1, Unfenced(), queue.queue_id)
    queue.loop = loop
    queue.submit("red", job("evil"))
    loop.tick(1.0)
    evil = queue.state.jobs["evil"]
    server.there[submission_name("q", evil.id, 1)] = SubmissionReport(False)
    run = made_run(run_of(queue.config, evil.id))
    write_events(run, STARTED, *[EXCHANGE | {"bytes_before": ""}] * 1000)
    queue.submit("blue", job("victim", ("eu",)))
    message = [loop.tick(float(second)) for second in (2, 12, 13)]
    assert queue.state.jobs["victim"].attempt is not None
    assert submission_name("q", queue.state.jobs["victim"].id, 1) in server.there
    assert any("bytes_before" in each for each in message[0])
    row = report_of(state_of(QueueJournal(queue.store).read())).job("evil")
    assert row is not None and "trouble: line 2" in row.message and "bytes_before" in row.message


def test_what_cannot_be_done_for_a_job_is_shown_with_it_until_it_can(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    broken = True

    def before(action: Action) -> None:
        if broken and isinstance(action, Submit) and action.request.name == "a":
            raise ClusterError("the job server is full")

    queue.world.before_act = before
    queue.submit("red", job("a"))
    queue.submit("blue", job("b", ("eu",)))
    queue.tick()
    assert queue.tick() == ("job a: the job server is full",)
    message = {row.name: row.message for row in report_of(queue.state).jobs}
    assert message["a"].endswith("trouble: the job server is full")
    assert "trouble" not in message["b"]
    assert queue.world.living("b")
    broken = False
    queue.run(5.0)
    assert queue.state.jobs["a"].progress.problem == ""
    assert queue.world.living("a")


def test_a_start_that_is_refused_ends_the_job(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)

    def before(action: Action) -> None:
        if isinstance(action, Submit) and action.request.name == "a":
            raise QueueRequestError("its code has links")

    queue.world.before_act = before
    queue.submit("red", job("a"))
    queue.submit("blue", job("b", ("eu",)))
    queue.run(60.0)
    ends = {each.name: each.end for each in queue.state.jobs.values()}
    assert ends["a"] is not None and ends["b"] is not None
    assert (ends["a"].outcome, ends["a"].code) == ("failed", "JOB_FAILED")
    assert "QUEUE_REQUEST: its code has links" in ends["a"].message
    assert ends["b"].outcome == "finished"
    assert queue.state.attempts["a"] == 1


@pytest.mark.parametrize(
    ("code", "attempts"),
    [("MANIFEST_INVALID", 1), ("CONFIG_INVALID", 1), ("TASK", 4), ("STORE", 4), (None, 4)],
)
def test_a_start_that_cannot_succeed_is_not_repeated(
    tmp_path: Path, code: str | None, attempts: int
) -> None:
    queue = sim_queue(tmp_path)
    queue.world.fails, queue.world.fail_code = {"a": 9}, code
    queue.submit("red", job("a"))
    queue.run(90.0)
    end = queue.state.jobs["a"].end
    assert end is not None and end.outcome == "failed"
    assert queue.state.attempts["a"] == attempts


def test_a_job_that_the_policy_fails_on_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", seconds=60.0))
    queue.run(12.0)

    def decide(self: Any, view: SlotView) -> SlotDecision:
        if "evil" in view.active:
            raise ZeroDivisionError
        return whole(self, view)

    kind = type(FifoPolicy().begin(cluster_of(queue.config, {}, 1), 0))
    whole = kind.decide
    monkeypatch.setattr(kind, "decide", decide)
    queue.submit("red", job("evil", ("eu",)))
    queue.submit("blue", job("good", ("eu",), seconds=10.0))
    queue.run(120.0)
    ends = {each.name: each.end and each.end.outcome for each in queue.state.jobs.values()}
    assert ends == {"a": "finished", "evil": "failed", "good": "finished"}
    assert "ZeroDivisionError" in str(queue.state.jobs["evil"].end)


def test_what_the_job_printed_last_says_why_it_ended() -> None:
    lines = "reading x\nerror [MANIFEST_INVALID] data/m.json is not there\n  fix: name one\n"
    details = JobDetails(
        type=JobType.SUBMISSION,
        entrypoint="",
        status=JobStatus.FAILED,
        message=f"Job entrypoint command failed with exit code 3, last available logs:\n{lines}",
    )
    message = submission_report(details)
    assert message == SubmissionReport(True, False, "MANIFEST_INVALID", "data/m.json is not there")


# ---------------------------------------------------------------------- run directories of jobs


def hostile_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[SimQueue, FakeServer, Path]:
    """Return a queue with a running job, and the directory of its run."""
    queue = sim_queue(tmp_path, runs=str(tmp_path / "runs"))
    world, server = world_of(queue, monkeypatch)
    queue.loop = QueueLoop(queue.config, queue.store, world, 1, Unfenced(), queue.queue_id)
    queue.submit("red", job("evil"))
    queue.loop.tick(1.0)
    evil = queue.state.jobs["evil"]
    server.there[submission_name("q", evil.id, 1)] = SubmissionReport(False)
    return queue, server, made_run(run_of(queue.config, evil.id))


def test_a_run_directory_that_cannot_be_read_in_time_holds_no_other_job_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.world.LOOK_S", 0.05)
    queue, server, run = hostile_run(tmp_path, monkeypatch)
    os.mkfifo(run / "events.jsonl")  # to open it waits for somebody who writes
    queue.submit("blue", job("victim", ("eu",)))
    message = [queue.loop.tick(float(second)) for second in (2, 12, 13)]
    assert submission_name("q", queue.state.jobs["victim"].id, 1) in server.there
    assert "did not answer within 0.05 s" in message[0][0]
    assert "has not answered" in message[1][0]
    evil = queue.state.jobs["evil"]
    server.there[submission_name("q", evil.id, 1)] = SubmissionReport(True, False, "TASK", "no")
    monkeypatch.setattr("geo_ray.scheduler.queue.world._READ_S", 0.0)
    queue.loop.tick(14.0)
    assert evil.attempt is None, "what its submission says of its end is enough"
    with (run / "events.jsonl").open("wb"):
        pass  # lets the thread that waits go on


def test_reading_a_log_ends_with_any_number_of_damaged_lines(tmp_path: Path) -> None:
    reader = StatusReader(made_run(str(tmp_path / "x.1")))
    write_events(tmp_path / "x.1", STARTED)
    with (tmp_path / "x.1" / "events.jsonl").open("ab") as file:
        file.write(b"x\n" * 1000)
    reader.read(100)
    assert 0 < reader.read_fraction < 0.3
    while reader.read_fraction < 1:
        reader.read(100)
    assert reader.totals.started is not None


def test_a_plan_of_any_size_is_refused(tmp_path: Path) -> None:
    run = made_run(str(tmp_path / "x.1"))
    for data in (b"[" * 100_000, b" " * 2_000_000 + b"{}", b"[]", b"\xff"):
        (run / "plan.json").write_bytes(data)
        with pytest.raises(RunDirectoryError, match="not a run directory"):
            directory.recorded_run(run)


def test_half_a_surrogate_pair_in_a_message_keeps_no_job_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, server, run = hostile_run(tmp_path, monkeypatch)
    failed = {"t_s": 2.0, "kind": "run_failed", "code": "X", "message": "\ud800", "fix": ""}
    write_events(run, STARTED, failed)
    evil = queue.state.jobs["evil"]
    server.there[submission_name("q", evil.id, 1)] = SubmissionReport(True, False, None, "bad")
    queue.loop.tick(2.0)
    assert evil.attempt is None
