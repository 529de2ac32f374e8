"""How a run stands is read from its directory, whoever drives it, and whether that lives."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.api.status import change_members, follow_status
from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import (
    MembersRefusedError,
    RegionLostError,
    RunActorMissingError,
    RunDirectoryError,
    RunFinishedError,
)
from geo_ray.cli.members import members as members_command
from geo_ray.cli.status import status as command
from geo_ray.cli.stop import stop as stop_command
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import (
    LEASE_KEY,
    LeaseRecord,
    driving,
    encode_record,
    seeker_of,
    this_process,
)
from geo_ray.runs.requests import take_member_requests
from geo_ray.runs.status import StatusReader
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, note_failure
from geo_ray.telemetry.status import status_lines
from tests.support.job_support import experiment

TARGET = ("train.target.metric=accuracy", "train.target.value=0.9",
          "train.target.direction=at_least")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return directory.create(experiment(f"run.dir={tmp_path / 'runs'}", *TARGET), tmp_path)


def quiet(text: str) -> None:
    """Nobody reads it."""


def write_steps(log: EventLog, *, first: int, last: int) -> None:
    for number in range(first, last + 1):
        for region in ("eu", "us"):
            log.write(
                "step",
                float(number),
                region=region,
                step=number,
                samples=16,
                loss=1.0 / number if region == "eu" else 3.0 / number,
                compute_s=0.5,
                wait_s=0.0,
                start_s=number - 1.0,
            )


def begin(log: EventLog) -> None:
    log.write(
        "run_started",
        0.0,
        run="trial",
        digest="d",
        strategy="sma",
        regions=["eu", "us"],
        task="digits",
        seed=0,
        simulated=False,
        averager="eu",
        steps={"eu": 10, "us": 10},
    )


def lease_of_another_machine(run: RunDirectory, renewal: int = 0) -> None:
    owner = this_process().model_copy(update={"host": "far", "machine": "m", "nonce": "t"})
    record = LeaseRecord(token=2, renewal=renewal, owner=owner, lives_s=10.0, doing="training")
    (run.path / LEASE_KEY).write_bytes(encode_record(record))


# ------------------------------------------------------------------ who drives it


def test_a_run_in_progress(run: RunDirectory) -> None:
    with (
        driving(seeker_of(run.path, quiet)) as lease,
        EventLog(run.path / EVENTS_FILE) as log,
    ):
        lease.note("starting workers")
        lease.renew()
        assert geo_ray.status(run.path).phase == "starting workers"
        begin(log)
        write_steps(log, first=1, last=4)
        log.write("exchange", 4.0, region="us", seq=1, start_s=3.5, bytes_sent=10,
                  bytes_received=10, blocking=True, staleness=0.0, round=1)  # fmt: skip
        log.write("wan", 4.0, src="us", dst="eu", bytes_by_class={"update": 1000})
        log.write("eval", 4.0, step=4, region=None, metrics={"accuracy": 0.5}, samples=90)
        lease.note("training")
        lease.renew()
        found = geo_ray.status(run.path)
    assert (found.phase, found.is_going, found.strategy) == ("training", True, "sma")
    assert found.run_actor is not None
    assert (found.run_actor.token, found.run_actor.alive) == (1, True)
    assert [(r.name, r.step, r.steps, r.exchanges) for r in found.regions] == [
        ("eu", 4, 10, 0),
        ("us", 4, 10, 1),
    ]
    assert [r.samples_per_s for r in found.regions] == [16.0, 16.0]
    assert found.samples_per_s == 32.0
    assert found.left_s == 6.0
    assert found.loss == pytest.approx(2 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert (found.round, found.eval_step, found.eval) == (1, 4, {"accuracy": 0.5})
    assert found.target is not None
    assert found.target.reached_s is None
    assert found.checkpoint is None
    assert (found.spent.seconds, found.spent.wan_bytes, found.spent.usd) == (4.0, 1000, None)


def test_the_driver_was_killed(run: RunDirectory) -> None:
    owner = this_process().model_copy(update={"started": "1"})  # its number is another's by now
    record = LeaseRecord(token=1, renewal=7, owner=owner, lives_s=1e9, doing="training")
    (run.path / LEASE_KEY).write_bytes(encode_record(record))
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
    found = geo_ray.status(run.path)
    assert (found.is_going, found.run_actor and found.run_actor.how) == (
        False,
        "its process was killed",
    )
    assert found.phase.startswith("cut off")
    assert {region.state for region in found.regions} == {"stopped"}


def killed(run: RunDirectory, ago_s: float, *more: tuple[str, str]) -> None:
    """A run whose driver was killed so long ago; ``more`` are kinds and causes of its events."""
    owner = this_process().model_copy(update={"started": "1"})
    record = LeaseRecord(token=1, renewal=7, owner=owner, lives_s=10.0, doing="training")
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=4)
        for kind, cause in more:
            log.write(kind, 4.0, cause=cause)
    (run.path / LEASE_KEY).write_bytes(encode_record(record))
    then_s = time.time() - ago_s
    os.utime(run.path / LEASE_KEY, (then_s, then_s))


def run_with(tmp_path: Path, *overrides: str) -> RunDirectory:
    return directory.create(experiment(f"run.dir={tmp_path / 'runs'}", *overrides), tmp_path)


def test_a_killed_driver_s_run_trains_on_while_its_supervisor_restarts_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, "cluster.kind=existing")
    killed(run, 10.0)
    found = geo_ray.status(run.path)
    assert (found.is_going, found.waits_s is not None) == (False, True)
    assert found.waits_s is not None and found.waits_s <= 50
    assert found.phase == "training while its run actor restarts"
    assert found.fix == f"`geo-ray train --resume {run.path}` watches it."
    assert [(each.state, each.samples_per_s) for each in found.regions] == [("trains on", 0.0)] * 2
    shown = CliRunner().invoke(command, [str(run.path)]).stdout
    assert "mean loss 0.5208, trains on" in shown


@pytest.mark.parametrize(
    ("override", "ago_s", "told", "why"),
    [
        ("cluster.kind=existing", 61.0, (), "its supervisor has ended"),
        ("cluster.kind=local", 1.0, (), None),
        (
            "cluster.kind=existing",
            1.0,
            (("stop_requested", "it was asked to"),),
            "it was asked to",
        ),
    ],
    ids=["too long ago", "local cluster", "was to stop"],
)
def test_a_killed_driver_s_run_is_cut_off_elsewhere(
    tmp_path: Path,
    override: str,
    ago_s: float,
    told: tuple[tuple[str, str], ...],
    why: str | None,
) -> None:
    run = run_with(tmp_path, override)
    killed(run, ago_s, *told)
    found = geo_ray.status(run.path)
    assert (found.phase, found.waits_s) == ("cut off", None)
    assert {each.state for each in found.regions} == {"stopped"}
    assert (found.message or "").startswith(why or "") and bool(found.message) is bool(why)
    assert found.fix == "It has no checkpoint: start again with `geo-ray train CONFIG`."
    store = CheckpointStore(run.checkpoints)
    part = write_part(store.begin(3), "a", {}, {})
    manifest = CheckpointManifest(
        id=3, step=1200, created="", config_digest="d" * 64, parts=(part,), healthy=True
    )
    store.commit(3, manifest)
    assert geo_ray.status(run.path).fix == (
        f"`geo-ray train --resume {run.path}` continues it from checkpoint 3 at step 1,200."
    )


def test_a_driver_that_gave_the_run_back_leaves_nobody_waiting(tmp_path: Path) -> None:
    run = run_with(tmp_path, "cluster.kind=existing")
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
    found = geo_ray.status(run.path)
    assert (found.phase, found.waits_s) == ("cut off", None)


def test_a_run_whose_driver_is_started_again_is_followed_on(tmp_path: Path) -> None:
    run = run_with(tmp_path, "cluster.kind=existing")
    killed(run, 1.0)
    followed = follow_status(run.path, every_s=0.01)
    assert [next(followed).waits_s is not None for _ in range(2)] == [True, True]
    note_failure(run.path, RegionLostError("gone"))
    assert [found.phase for found in followed] == ["failed"]


def test_a_driver_elsewhere_is_listened_for(run: RunDirectory) -> None:
    """A log that this machine does not lock tells nothing; a renewal does, silence in the end."""
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
    lease_of_another_machine(run)
    clock = VirtualClock()
    reader = StatusReader(run.path, clock)
    assert reader.read().is_going is None
    assert reader.read().phase == "last activity: training"
    clock.advance_to_s(5.0)
    lease_of_another_machine(run, renewal=1)
    assert (reader.read().is_going, reader.read().phase) == (True, "training")
    clock.advance_to_s(17.4)
    assert reader.read().is_going is True
    clock.advance_to_s(17.6)
    silent = reader.read()
    assert (silent.is_going, silent.run_actor and silent.run_actor.how) == (
        False,
        "no renewal of its lease for 10 s",
    )


def test_a_driver_of_another_machine_that_locks_the_log(run: RunDirectory) -> None:
    lease_of_another_machine(run)
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        assert StatusReader(run.path, VirtualClock()).read().is_going is True


# ------------------------------------------------------------------ what it has come to


def test_a_region_is_lost_and_comes_back(run: RunDirectory) -> None:
    reader = StatusReader(run.path)
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=2)
        log.write("region_lost", 3.0, region="us", cause="its bridge is gone")
        log.write("averager_moved", 3.0, region="eu", term=2)
        eu, us = reader.read().regions
        assert (eu.state, eu.lost_cause) == ("computing", None)
        assert (us.state, us.lost_cause, us.samples_per_s) == ("lost", "its bridge is gone", 0.0)
        write_steps(log, first=3, last=3)  # told late
        assert reader.read().regions[1].state == "lost"
        write_steps(log, first=4, last=4)
        assert [region.lost_cause for region in reader.read().regions] == [None, None]


def test_a_region_leaves_and_another_joins(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=2)
        log.write("region_drained", 2.0, region="us", cause="asked")
        log.write(
            "region_joined", 2.0, region="asia", view=3, round=2, step=4, bytes=10, took_s=1.0
        )
        found = geo_ray.status(run.path)
    assert [(r.name, r.state, r.samples_per_s) for r in found.regions] == [
        ("eu", "computing", 16.0),
        ("us", "left", 0.0),
        ("asia", "starting", 0.0),
    ]
    assert [region.steps for region in found.regions] == [10, 10, 10]  # the newcomer's, too
    assert found.loss == found.regions[0].loss  # not of who has left, nor of who has none yet
    assert found.samples_per_s == 16.0


def test_the_newest_readable_checkpoint(run: RunDirectory) -> None:
    store = CheckpointStore(run.checkpoints)
    for id in (0, 1):
        part = write_part(store.begin(id), "a", {}, {})
        store.commit(id, CheckpointManifest(
            id=id, step=5 * (id + 1), created="", config_digest="d" * 64, parts=(part,),
            healthy=id == 0))  # fmt: skip
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        log.write("checkpoint", 6.0, id=1, step=10, bytes=1)
        write_steps(log, first=1, last=9)
    found = geo_ray.status(run.path).checkpoint
    assert found is not None
    assert (found.id, found.step, found.age_s, found.healthy) == (1, 10, 3.0, False)
    (run.checkpoints / "ckpt-00000001" / "manifest.json").write_text("damaged")
    found = geo_ray.status(run.path).checkpoint
    assert found is not None
    assert (found.id, found.step, found.age_s, found.healthy) == (0, 5, None, True)


def test_a_failed_run_says_why_and_what_to_do(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=2)
    note_failure(run.path, RegionLostError("the bridge of 'us' is lost"))
    found = geo_ray.status(run.path)
    assert (found.phase, found.code, found.is_going) == ("failed", "REGION_LOST", False)
    assert found.fix is not None
    assert f"--resume {run.path}" in found.fix
    assert (found.samples_per_s, found.left_s) == (0.0, None)


def test_the_target_counts_from_when_it_was_first_reached(run: RunDirectory) -> None:
    with EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        for step, accuracy in ((1, 0.5), (2, 0.95), (3, 0.92)):
            log.write("eval", float(step), step=step, region=None,
                      metrics={"accuracy": accuracy}, samples=9)  # fmt: skip
    found = geo_ray.status(run.path)
    assert found.target is not None
    assert (found.target.reached_s, found.eval["accuracy"]) == (2.0, 0.92)


# ------------------------------------------------------------------ the command


def test_the_lines(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)) as lease, EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=4)
        log.write("region_lost", 4.0, region="us", cause="its bridge\nis gone")
        log.write("worker_lost", 4.0, region="eu", worker=0, cause="killed")
        lease.note("training")
        lease.renew()
        shown = CliRunner().invoke(command, [str(run.path)])
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{run.path}: training, sma, about 6 s left"
    assert lines[1].startswith("  run actor  host ")
    assert lines[1].endswith(": alive")
    assert lines[2:] == [
        "  member     eu: step 4 of 10, 0 exchanges, mean loss 0.5208, 16 samples/s, "
        "1 worker lost, computing",
        "  lost       us after step 4: its bridge is gone",
        "  training   mean loss 0.5208 of the newest 20 steps, 16 samples/s, averager in eu, "
        "target accuracy at least 0.9: not reached",
        "  saved      no checkpoint yet",
        "  spent      4.0 s, 0 B between regions",
    ]


def test_the_lines_fit_the_terminal(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=4)
    found = geo_ray.status(run.path).model_copy(update={"message": "some words " * 20, "run": "r"})
    wide, narrow = status_lines(found), status_lines(found, 80)
    assert max(map(len, wide)) > 200 and max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()) == " ".join(" ".join(wide).split())
    assert [line for line in narrow if line.startswith("             some words")], narrow


def test_a_region_that_takes_no_steps_has_no_pace(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=10)
        lines = status_lines(geo_ray.status(run.path))
    assert sum("step 10 of 10" in line and line.endswith("done") for line in lines) == 2
    assert not [line for line in lines if "samples/s" in line]


def test_json_and_follow(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
    one = CliRunner().invoke(command, [str(run.path), "--json"])
    assert json.loads(one.stdout) == geo_ray.status(run.path).model_dump(mode="json")
    more = CliRunner().invoke(command, [str(run.path), "--json", "--follow"])
    assert [json.loads(line)["is_going"] for line in more.stdout.splitlines()] == [False]


def test_follow_goes_on_until_nobody_drives_the_run(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        followed = follow_status(run.path, every_s=0.01)
        assert next(followed).is_going is True
        assert next(followed).is_going is True
    assert [found.is_going for found in followed][-1] is False


def test_a_run_that_has_not_begun_and_no_run(run: RunDirectory, tmp_path: Path) -> None:
    found = geo_ray.status(run.path)
    assert (found.phase, found.run_actor, found.regions) == ("not begun", None, ())
    assert "  run actor  none recorded" in CliRunner().invoke(command, [str(run.path)]).stdout
    with pytest.raises(RunDirectoryError, match="no run"):
        geo_ray.status(tmp_path / "gone")


def test_who_stops_a_run_that_nobody_drives_is_told(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        answer = CliRunner().invoke(stop_command, [str(run.path)])
        assert (answer.exit_code, answer.output[:9]) == (0, "requested")
    answer = CliRunner().invoke(stop_command, [str(run.path)])
    assert (answer.exit_code, answer.output) == (
        0,
        f"{run.path} is not active (cut off): nothing to stop\n",
    )


# ------------------------------------------------------------------ changes of members


@contextmanager
def answered(run: RunDirectory, kind: str, **more: str) -> Iterator[EventLog]:
    """A run_actor that takes requests, and answers each with an event."""
    is_over = threading.Event()
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)

        def answer() -> None:
            while not is_over.wait(0.02):
                for request in take_member_requests(run.path):
                    about = {"verb": request.verb, "region": request.region}
                    log.write(kind, 1.0, **about, request=request.id, **more)

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            yield log
        finally:
            is_over.set()
            answering.join()


def test_a_request_that_is_begun_says_so(run: RunDirectory) -> None:
    with answered(run, "members_accepted"):
        assert change_members(run.path, "drain", "us", wait_s=60.0) == "begun"
        shown = CliRunner().invoke(members_command, [str(run.path), "drain", "us", "--wait", "60"])
        assert (shown.exit_code, shown.output.partition(";")[0]) == (0, "begun: drain us")
        states = geo_ray.members(run.path)["state"]
        assert states == ["member", "leaving"]
        assert [each.state for each in geo_ray.status(run.path).regions] == ["starting", "leaving"]


def test_a_request_that_is_refused_is_an_error_with_the_reason(run: RunDirectory) -> None:
    with answered(run, "members_refused", cause="it hosts the averager"):
        with pytest.raises(MembersRefusedError, match="'drain eu' is refused: it hosts the aver"):
            change_members(run.path, "drain", "eu", wait_s=60.0)
        failed = CliRunner().invoke(members_command, [str(run.path), "drain", "eu", "--wait", "60"])
        assert isinstance(failed.exception, MembersRefusedError) and failed.exception.exit_code
        assert geo_ray.status(run.path).refused == "drain eu: it hosts the averager"
        shown = CliRunner().invoke(command, [str(run.path)]).output
        assert "  refused    drain eu: it hosts the averager" in shown
        shown = CliRunner().invoke(members_command, [str(run.path)]).output
        assert "refused: drain eu: it hosts the averager" in shown.splitlines()


@pytest.mark.parametrize("more", [["--no-wait"], ["--wait", "0.3"]])
def test_a_request_that_nobody_answers(run: RunDirectory, more: list[str]) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        shown = CliRunner().invoke(members_command, [str(run.path), "drain", "us", *more])
        (asked,) = take_member_requests(run.path)
        log.write("members_refused", 1.0, verb="drain", region="us", cause="no", request=asked.id)
        assert shown.exit_code == 0 and shown.output.startswith("asked: drain us")
        # An answer to an earlier request is none to this one.
        assert change_members(run.path, "drain", "us", wait_s=0.3) == "unanswered"


def test_nothing_is_asked_of_a_run_that_nobody_drives(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
    with pytest.raises(RunActorMissingError, match="\\(cut off\\): nothing was requested"):
        change_members(run.path, "drain", "us")
    with EventLog(run.path / EVENTS_FILE) as log:
        log.write("run_finished", 9.0, summary={})
    with pytest.raises(RunFinishedError, match="the run is finished: nothing"):
        change_members(run.path, "drain", "us")
    answer = CliRunner().invoke(stop_command, [str(run.path)])
    assert answer.output == f"{run.path} is finished: nothing to stop\n"
    assert take_member_requests(run.path) == []


def test_a_run_whose_driver_is_started_again_keeps_what_is_asked(tmp_path: Path) -> None:
    run = run_with(tmp_path, "cluster.kind=existing")
    killed(run, 1.0)
    assert change_members(run.path, "drain", "us", wait_s=600.0) == "unanswered"
    assert [(each.verb, each.region) for each in take_member_requests(run.path)] == [
        ("drain", "us")
    ]


def test_a_region_on_its_way_in(run: RunDirectory) -> None:
    with driving(seeker_of(run.path, quiet)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, first=1, last=4)
        log.write("region_lost", 4.0, region="us", cause="killed")
        log.write("region_joining", 5.0, region="us")
        log.write("region_joining", 5.0, region="asia")
        assert geo_ray.members(run.path)["state"] == ["member", "joining"]
        found = geo_ray.status(run.path)
        assert [(each.name, each.state, each.lost_cause) for each in found.regions] == [
            ("eu", "computing", None),
            ("us", "joining", None),
            ("asia", "joining", None),
        ]
        assert (found.samples_per_s, found.left_s) == (12.8, 7.5)
        log.write("join_failed", 6.0, region="us", cause="its port is closed")
        log.write("join_failed", 6.0, region="asia", cause="its port is closed")
        states = [each.state for each in geo_ray.status(run.path).regions]
        assert states == ["computing", "lost", "did not join"]
    log_of_who_was_killed = EventLog(run.path / EVENTS_FILE)
    log_of_who_was_killed.write("region_joining", 7.0, region="us")
    log_of_who_was_killed.close()
    assert geo_ray.members(run.path)["state"] == ["member", "did not join"]
