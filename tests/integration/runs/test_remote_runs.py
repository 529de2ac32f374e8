"""Runs whose directory is in a bucket, behind a real S3 server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import geo_ray
from geo_ray.base.errors import (
    ConfigError,
    LeaseLostError,
    RunDirectoryError,
    RunHeldError,
    StoreError,
)
from geo_ray.base.load import dump_yaml
from geo_ray.data.tasks.load import load_task
from geo_ray.runs import directory
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.lease import LEASE_KEY, decode_record
from geo_ray.runs.remote import Copy, RunObjects, copy_path, driven_copy, view_copy
from geo_ray.runs.requests import take_member_requests
from geo_ray.runs.uploader import Uploader, uploading
from geo_ray.storage.uri import join, parse_s3
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, read_events
from tests.support.s3_support import client_of, new_prefix, proxy_before, s3_server, set_credentials
from tests.support.train_support import (
    eventually,
    experiment_of,
    final_digests,
    simulate,
    write_config,
)

pytestmark = pytest.mark.timeout(900)
FIRST_WRITTEN = ("/files/", "/events/")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this machine keeps its copies."""
    set_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    return tmp_path / "machine"


@pytest.fixture
def uri(endpoint: str) -> str:
    objects = RunObjects(f"{new_prefix(endpoint)}".replace("prefix?", "prefix/run?"))
    assert objects.begin() and not objects.begin()
    return objects.uri


class Driver:
    """Writes to a run's directory on one machine, and copies it."""

    def __init__(self, uri: str, path: Path, token: int, holds: bool = True) -> None:
        self.path, self.holds = path, holds
        path.mkdir(parents=True, exist_ok=True)
        self.uploader = Uploader(RunObjects(uri), path, token, self._check)

    def _check(self) -> None:
        if not self.holds:
            raise LeaseLostError("somebody else has it")

    def write(self, *texts: str) -> None:
        with EventLog(self.path / EVENTS_FILE) as log:
            for text in texts:
                log.write("stop_requested", 0.0, cause=text)


def said(path: Path) -> list[str]:
    return [event["cause"] for event in read_events(path / EVENTS_FILE)]


# ------------------------------------------------------------------ copies


def test_a_copy_has_what_the_driver_has_written(uri: str, tmp_path: Path) -> None:
    driver = Driver(uri, tmp_path / "driver", 1)
    driver.write("one", "two")
    (driver.path / "logs").mkdir()
    (driver.path / "logs" / "a.txt").write_text("first")
    (driver.path / "model.safetensors").write_bytes(b"m" * (9 << 20))  # in pieces
    driver.uploader.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "two"]
    assert (copy.path / "logs" / "a.txt").read_text() == "first"
    assert not (copy.path / "model.safetensors").exists()
    driver.write("three")
    (driver.path / "logs" / "a.txt").write_text("second, longer")
    driver.uploader.tick()
    assert not copy.pull(models=True)
    assert said(copy.path) == ["one", "two", "three"]
    assert (copy.path / "logs" / "a.txt").read_text() == "second, longer"
    assert (copy.path / "model.safetensors").read_bytes() == b"m" * (9 << 20)
    assert len([*RunObjects(uri)._versions()]) == 2  # older ones are removed


def test_a_run_that_has_written_nothing_yet_has_an_empty_log(uri: str) -> None:
    assert said(view_copy(uri)) == said(driven_copy(uri)) == []


def test_a_reader_of_events_also_has_the_configuration(
    endpoint: str, uri: str, tmp_path: Path
) -> None:
    with proxy_before(endpoint) as proxy:
        through = uri.replace(quote(endpoint, safe=""), quote(proxy.endpoint, safe=""))
        driver = Driver(through, tmp_path / "driver", 1)
        driver.write("one")
        (driver.path / "config.lock.yaml").write_text("{}")
        driver.uploader.start()
        driver.uploader.close()
        written = [r.path for r in proxy.seen if r.method == "PUT"]
    first = [next(n for n, path in enumerate(written) if part in path) for part in FIRST_WRITTEN]
    assert first == sorted(first)
    assert (view_copy(uri) / "config.lock.yaml").read_text() == "{}"


def test_a_version_that_was_replaced_meanwhile_is_missing_and_no_full_disk(
    uri: str, tmp_path: Path
) -> None:
    driver, objects = Driver(uri, tmp_path / "driver", 1), RunObjects(uri)
    for text in ("first", "second"):
        (driver.path / "summary.json").write_text(text)
        driver.uploader.tick()
        listed = objects.files()["summary.json"]
        if text == "first":
            replaced = listed
    with pytest.raises(FileNotFoundError):
        objects.get_file(replaced, tmp_path / "copy.json")
    objects.get_file(listed, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == "second"


def test_many_small_pieces_are_put_together(uri: str, tmp_path: Path) -> None:
    driver, copy = Driver(uri, tmp_path / "driver", 1), Copy(RunObjects(uri), tmp_path / "copy")
    texts = [f"line {number}" for number in range(150)]
    for number, text in enumerate(texts):
        driver.write(text)
        driver.uploader.tick()
        if number % 40 == 0:
            copy.pull(models=False)
    assert len(RunObjects(uri).segments()) < 70
    copy.pull(models=False)
    assert said(copy.path) == said(view_copy(uri)) == texts


def test_what_is_written_after_the_run_was_taken_over_counts_for_nothing(
    uri: str, tmp_path: Path
) -> None:
    """However late it is: the driver before had looked at its lease, and then stood still."""
    first = Driver(uri, tmp_path / "first", 1)
    first.write("one", "two")
    (first.path / "summary.json").write_text("of the first")
    first.uploader.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    copy.pull(models=False)
    second = Driver(uri, driven_copy(uri), 2)
    second.uploader.start()
    second.write("taken over")
    second.uploader.tick()
    first.write("late", "and later")
    (first.path / "summary.json").write_text("of the first, late")
    first.uploader.tick()
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "two", "taken over"]
    (second.path / "summary.json").write_text("of the second")
    second.uploader.close()
    for path in (view_copy(uri), driven_copy(uri)):
        assert said(path) == ["one", "two", "taken over"]
        assert (path / "summary.json").read_text() == "of the second"
    first.holds = False
    with pytest.raises(LeaseLostError):
        first.uploader.tick()


def test_a_reader_that_had_the_late_lines_loses_them(uri: str, tmp_path: Path) -> None:
    first = Driver(uri, tmp_path / "first", 1)
    first.write("one")
    first.uploader.tick()
    second = Driver(uri, driven_copy(uri), 2)
    first.write("late")
    first.uploader.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    copy.pull(models=False)
    assert said(copy.path) == ["one", "late"]
    second.write("taken over")
    with pytest.raises(RunHeldError):  # it had not seen all when it began
        second.uploader.start()
    second = Driver(uri, driven_copy(uri), 2)
    second.uploader.start()
    second.write("taken over again")
    second.uploader.close()
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "late", "taken over again"]


def test_what_the_bucket_lacks_is_copied_by_the_next_driver_on_the_machine(uri: str) -> None:
    path = driven_copy(uri)
    first = Driver(uri, path, 1)
    first.write("one")
    first.uploader.tick()
    first.write("two")  # and then the bucket was out of reach
    assert driven_copy(uri) == path and said(path) == ["one", "two"]
    with uploading(uri, path, 2, lambda: None):
        pass
    assert said(view_copy(uri)) == ["one", "two"]


def test_requests_reach_the_driver_once(uri: str, tmp_path: Path) -> None:
    driver, objects = Driver(uri, tmp_path / "driver", 1), RunObjects(uri)
    driver.write("one")
    objects.ask("old.json", b"{}")
    driver.uploader.start()
    assert take_member_requests(driver.path) == []  # of a run that was over
    objects.ask("1.json", b'{"verb": "drain", "region": "eu-west"}')
    objects.ask("1.json", b'{"verb": "drain", "region": "eu-west"}')
    eventually(lambda: (driver.path / "requests" / "1.json").exists(), "the request")
    assert [each.region for each in take_member_requests(driver.path)] == ["eu-west"]
    driver.uploader.close()
    assert objects.take_requests() == {}


def test_a_bucket_that_is_out_of_reach_is_caught_up_with(
    endpoint: str, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces and files that did not come through are sent again, once each, and nothing twice."""
    with proxy_before(endpoint) as proxy:
        through = uri.replace(quote(endpoint, safe=""), quote(proxy.endpoint, safe=""))
        assert through != uri
        driver = Driver(through, tmp_path / "driver", 1)
        driver.write("one")
        driver.uploader.start()
        proxy.trouble = lambda request: "503"
        driver.write("two")
        (driver.path / "summary.json").write_text("{}")
        eventually(lambda: "is not up to date" in caplog.text, "a warning")
        proxy.trouble = lambda request: "lost" if request.method == "PUT" else None
        driver.write("three")
        eventually(lambda: said(view_copy(uri)) == ["one", "two", "three"], "it catches up")
        proxy.trouble = lambda request: None
        driver.uploader.close()
    assert (view_copy(uri) / "summary.json").read_text() == "{}"


def test_a_piece_whose_answer_got_lost_may_be_written_again(uri: str, tmp_path: Path) -> None:
    objects, line = RunObjects(uri), b'{"a":1}\n'
    (tmp_path / EVENTS_FILE).write_bytes(line)
    there = objects.put_segment(1, 0, line)  # and the uploader never heard that it was
    uploader = Uploader(objects, tmp_path, 1, lambda: None)
    uploader.tick()
    assert objects.segments() == [there]
    (tmp_path / EVENTS_FILE).write_bytes(line * 2)
    uploader.tick()
    assert (view_copy(uri) / EVENTS_FILE).read_bytes() == line * 2


def test_a_damaged_object_is_told(uri: str, tmp_path: Path) -> None:
    driver, objects = Driver(uri, tmp_path / "driver", 1), RunObjects(uri)
    driver.write("one")
    driver.uploader.tick()
    (segment,) = objects.segments()
    objects._bucket.put(f"{objects._prefix}events/{segment.name}", b"something else")
    with pytest.raises(StoreError, match="cannot be read completely"):
        view_copy(uri)


def test_a_run_that_is_not_there_is_told(uri: str) -> None:
    wrong = uri.replace("/run?", "/rum?")
    with pytest.raises(RunDirectoryError, match=r"no run s3://.*rum"):
        geo_ray.status(wrong)
    assert not copy_path(wrong, "seen").exists()


def test_a_run_that_was_removed_is_told_although_there_is_a_copy(uri: str, tmp_path: Path) -> None:
    driver = Driver(uri, tmp_path / "driver", 1)
    (driver.path / "summary.json").write_text("{}")
    driver.uploader.tick()
    assert (view_copy(uri) / "summary.json").exists()
    RunObjects(uri).discard()
    with pytest.raises(RunDirectoryError, match="no run"):
        view_copy(uri)
    assert not copy_path(uri, "seen").exists()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"steps": 2, "keep_best": {"metric": "loss", "mode": "min"}}}, "keep_best"),
        ({"run": {"dir": "s3://b/p?what=1"}}, "`dir`: address of bucket"),
    ],
)
def test_what_needs_a_directory_is_refused(tmp_path: Path, changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        experiment_of(tmp_path, **({"run": {"dir": "s3://b/p"}} | changes))


def test_credentials_in_an_address_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(experiment_of(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        geo_ray.load_config(path, {"run.dir": "s3://me:canary@bucket/runs"})
    assert "contains credentials" in str(caught.value) and "canary" not in str(caught.value)


# ------------------------------------------------------------------ runs


def test_a_simulated_run_is_seen_from_its_address(endpoint: str, tmp_path: Path) -> None:
    dir = new_prefix(endpoint)
    done = geo_ray.simulate(experiment_of(tmp_path, run={"dir": dir}), base_dir=tmp_path)
    uri = dir.replace("?", "/tiny?")
    assert done.directory.address == uri
    seen = geo_ray.open_run(uri)
    assert seen.path != done.path and [*seen.events()] == [*done.events()]
    assert seen.summary == done.summary and seen.model() is not None
    assert geo_ray.status(uri).phase == "finished"
    assert geo_ray.members(uri)["state"] == ["member"] * 2
    again = geo_ray.simulate(experiment_of(tmp_path, run={"dir": dir}), base_dir=tmp_path)
    assert again.name == "tiny-2"


def test_a_run_that_was_copied_to_another_bucket_is_that_of_its_new_address(
    endpoint: str, tmp_path: Path
) -> None:
    dir = new_prefix(endpoint)
    experiment = experiment_of(tmp_path, run={"dir": dir})
    done = geo_ray.simulate(experiment, base_dir=tmp_path)
    generated, _ = prepare_manifest(
        experiment, load_task(experiment.task, tmp_path), tmp_path, done.directory.data
    )
    old, new = (parse_s3(each) for each in (dir, new_prefix(endpoint)))
    client = client_of(endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=old.bucket):
        for each in page["Contents"]:
            source = {"Bucket": old.bucket, "Key": each["Key"]}
            client.copy_object(Bucket=new.bucket, Key=each["Key"], CopySource=source)
            client.delete_object(**source)
    uri = dir.replace(old.bucket, new.bucket).replace("?", "/tiny?")
    seen = geo_ray.open_run(uri)
    assert seen.directory.address == uri and seen.summary == done.summary
    run, _ = directory.reopen(driven_copy(uri))
    assert run.address == uri
    moved, where = prepare_manifest(
        experiment, load_task(experiment.task, tmp_path), tmp_path, run.data
    )
    assert old.bucket not in where + str(moved.stores)
    assert moved.shards == generated.shards
    assert places_of(run, experiment.checkpoint).main == join(uri, "checkpoints")


class Machine:
    """One that shares the bucket with others, and nothing else."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self._environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geo_ray.cli.main", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self._environment, cwd=self.place, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *words: str) -> str:
        done = self.start(*words)
        out, err = done.communicate(timeout=300)
        assert done.returncode == 0, err
        return out


@pytest.mark.slow
def test_a_run_whose_bucket_stays_away_trains_to_its_end_and_keeps_its_model_here(
    endpoint: str, tmp_path: Path
) -> None:
    train = {"steps": 40, "eval_every": 20, "step_timeout_s": 60}
    dir = new_prefix(endpoint)
    with proxy_before(endpoint) as proxy:
        config = experiment_of(
            tmp_path,
            name="far",
            cluster={"kind": "local"},
            train=train,
            run={"dir": dir.replace(quote(endpoint, safe=""), quote(proxy.endpoint, safe=""))},
            emulate={"step_s": 0.25},
            checkpoint={"every_s": 0.5, "retry_s": 2.0},
        )
        uri = config.run.dir.replace("?", "/far?")
        machine, other = Machine(tmp_path / "machine"), Machine(tmp_path / "other")
        trains = machine.start("train", str(write_config(tmp_path, config)), "--plain")
        try:
            eventually(lambda: trains.poll() is not None or begun(uri), "the run begins")
            proxy.trouble = lambda r: None if "/data/" in r.path else "403"
            out, err = trains.communicate(timeout=250)
        finally:
            trains.kill()
            trains.wait()
        assert trains.returncode == StoreError.exit_code, (out, err)
        assert f"geo-ray train --resume '{uri}'" in err
        (model,) = machine.place.rglob("far/model.safetensors")
        assert str(model) in err
        log = model.parent / EVENTS_FILE
        assert log.read_text().count('"kind":"checkpoint_failed"') > 3
        assert '"kind":"run_finished"' in log.read_text()

        proxy.trouble = lambda _: None
        again = machine.start("train", "--resume", uri, "--plain")
        assert "[RUN_FINISHED]" in again.communicate(timeout=100)[1]
        other.run("export", uri, "--out", str(tmp_path / "m.safetensors"))
        assert geo_ray.status(uri).phase == "finished"


@pytest.mark.slow
def test_a_run_is_watched_stopped_and_resumed_from_machines_that_share_nothing(
    endpoint: str, tmp_path: Path
) -> None:
    train = {"steps": 24, "eval_every": 12, "step_timeout_s": 60}
    own = {"cluster": {"kind": "local"}, "name": "far", "train": train}
    quiet = final_digests(simulate(experiment_of(tmp_path, **own), tmp_path).events)
    dir = new_prefix(endpoint)
    config = experiment_of(tmp_path, **own, run={"dir": dir}, emulate={"step_s": 1.0})
    uri = dir.replace("?", "/far?")
    first, second, third = (Machine(tmp_path / name) for name in ("first", "second", "third"))
    trains = first.start("train", str(write_config(tmp_path, config)), "--plain")
    try:
        eventually(lambda: trains.poll() is not None or begun(uri), "the run begins")
        assert trains.poll() is None, trains.communicate()
        told = eventually(lambda: goes_on(second.run("status", uri)), "it trains")
        assert "alive" in told
        second.run("stop", uri)
        out, err = trains.communicate(timeout=200)
    finally:
        trains.kill()
        trains.wait()
    assert trains.returncode == 130, (out, err)
    assert f"geo-ray train --resume '{uri}'" in err
    assert "checkpoint" in second.run("status", uri)
    assert second.run("checkpoints", uri).count("healthy") == 1
    found = RunObjects(uri).lease().read(LEASE_KEY)
    assert found is not None and decode_record(found.data).released

    third.run("train", "--resume", uri, "--plain")
    assert not (third.place / "runs").exists()
    run = geo_ray.open_run(uri)  # on a fourth one
    assert run.finished and run.directory.address == uri
    assert final_digests([*run.events()]) == quiet
    assert len(run.events("run_started")) == 2
    assert run.report().exists() and run.model() is not None
    assert "finished" in second.run("status", uri)
    refused = third.start("train", "--resume", uri)
    assert "RUN_FINISHED" in refused.communicate(timeout=400)[1]


@pytest.mark.slow
def test_a_run_in_a_bucket_outlives_its_run_actor(endpoint: str, tmp_path: Path) -> None:
    train = {"steps": 40, "eval_every": 2, "step_timeout_s": 60}
    own = {"cluster": {"kind": "local"}, "name": "far", "train": train}
    quiet = simulate(experiment_of(tmp_path, **own), tmp_path)
    dir = new_prefix(endpoint)
    config = experiment_of(
        tmp_path, **own, run={"dir": dir}, emulate={"step_s": 0.5}, checkpoint={"every_s": 0.5}
    )
    uri, machine = dir.replace("?", "/far?"), Machine(tmp_path / "machine")
    trains = machine.start("train", str(write_config(tmp_path, config)), "--plain")
    try:
        eventually(lambda: trains.poll() is not None or saved(uri), "it has saved")
        assert trains.poll() is None, trains.communicate()
        found = RunObjects(uri).lease().read(LEASE_KEY)
        assert found is not None
        os.kill(decode_record(found.data).owner.pid, signal.SIGKILL)
        out, err = trains.communicate(timeout=400)
    finally:
        trains.kill()
        trains.wait()
    assert trains.returncode == 0, (out, err)
    run = geo_ray.open_run(uri)
    assert run.finished and final_digests([*run.events()]) == final_digests(quiet.events)
    assert len(run.events("run_started")) == 1 and len(run.events("run_actor_attached")) == 1


def saved(uri: str) -> bool:
    return begun(uri) and any(
        event.kind == "checkpoint" for event in geo_ray.open_run(uri).events()
    )


def goes_on(status: str) -> str:
    return status if "training" in status else ""


def begun(uri: str) -> bool:
    return bool(RunObjects(uri).segments())
