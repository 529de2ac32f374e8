"""Runs whose directory is in a bucket, behind a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_support import new_prefix, s3_server, set_credentials
from train_support import eventually, experiment_of, final_digests, simulate

import geo_ray
from geo_ray.config.experiment import Experiment
from geo_ray.errors import (
    InterruptedRunError,
    LeaseLostError,
    RunDirectoryError,
    RunFinishedError,
    RunHeldError,
    StoreError,
)
from geo_ray.job.far.copy import Copy, copy_path, driven_copy, seen_copy
from geo_ray.job.far.mirror import Mirror, mirrored
from geo_ray.job.far.objects import RunObjects
from geo_ray.lease.record import LEASE_KEY, decode_record
from geo_ray.observe.events.log import EVENTS_FILE, EventLog, read_events
from geo_ray.runtime.cluster.local import LocalCluster
from geo_ray.runtime.control.membership.member_requests import take

pytestmark = pytest.mark.timeout(600)


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

    def __init__(self, uri: str, path: Path, epoch: int, holds: bool = True) -> None:
        self.path, self.holds = path, holds
        path.mkdir(parents=True, exist_ok=True)
        self.mirror = Mirror(RunObjects(uri), path, epoch, self._check)

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
    driver.mirror.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "two"]
    assert (copy.path / "logs" / "a.txt").read_text() == "first"
    assert not (copy.path / "model.safetensors").exists()
    driver.write("three")
    (driver.path / "logs" / "a.txt").write_text("second, longer")
    driver.mirror.tick()
    assert not copy.pull(models=True)
    assert said(copy.path) == ["one", "two", "three"]
    assert (copy.path / "logs" / "a.txt").read_text() == "second, longer"
    assert (copy.path / "model.safetensors").read_bytes() == b"m" * (9 << 20)
    assert len([*RunObjects(uri)._versions()]) == 2  # older ones are removed


def test_many_small_pieces_are_put_together(uri: str, tmp_path: Path) -> None:
    driver, copy = Driver(uri, tmp_path / "driver", 1), Copy(RunObjects(uri), tmp_path / "copy")
    texts = [f"line {number}" for number in range(150)]
    for number, text in enumerate(texts):
        driver.write(text)
        driver.mirror.tick()
        if number % 40 == 0:
            copy.pull(models=False)
    assert len(RunObjects(uri).segments()) < 70
    copy.pull(models=False)
    assert said(copy.path) == said(seen_copy(uri)) == texts


def test_what_is_written_after_the_run_was_taken_over_counts_for_nothing(
    uri: str, tmp_path: Path
) -> None:
    """However late it is: the driver before had looked at its lease, and then stood still."""
    first = Driver(uri, tmp_path / "first", 1)
    first.write("one", "two")
    (first.path / "summary.json").write_text("of the first")
    first.mirror.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    copy.pull(models=False)
    second = Driver(uri, driven_copy(uri), 2)
    second.mirror.start()
    second.write("taken over")
    second.mirror.tick()
    first.write("late", "and later")
    (first.path / "summary.json").write_text("of the first, late")
    first.mirror.tick()
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "two", "taken over"]
    (second.path / "summary.json").write_text("of the second")
    second.mirror.close()
    for path in (seen_copy(uri), driven_copy(uri)):
        assert said(path) == ["one", "two", "taken over"]
        assert (path / "summary.json").read_text() == "of the second"
    first.holds = False
    with pytest.raises(LeaseLostError):
        first.mirror.tick()


def test_a_reader_that_had_the_late_lines_loses_them(uri: str, tmp_path: Path) -> None:
    first = Driver(uri, tmp_path / "first", 1)
    first.write("one")
    first.mirror.tick()
    second = Driver(uri, driven_copy(uri), 2)
    first.write("late")
    first.mirror.tick()
    copy = Copy(RunObjects(uri), tmp_path / "copy")
    copy.pull(models=False)
    assert said(copy.path) == ["one", "late"]
    second.write("taken over")
    with pytest.raises(RunHeldError):  # it had not seen all when it began
        second.mirror.start()
    second = Driver(uri, driven_copy(uri), 2)
    second.mirror.start()
    second.write("taken over again")
    second.mirror.close()
    assert not copy.pull(models=False)
    assert said(copy.path) == ["one", "late", "taken over again"]


def test_what_the_bucket_lacks_is_copied_by_the_next_driver_on_the_machine(uri: str) -> None:
    path = driven_copy(uri)
    first = Driver(uri, path, 1)
    first.write("one")
    first.mirror.tick()
    first.write("two")  # and then the bucket was out of reach
    assert driven_copy(uri) == path and said(path) == ["one", "two"]
    with mirrored(uri, path, 2, lambda: None):
        pass
    assert said(seen_copy(uri)) == ["one", "two"]


def test_requests_reach_the_driver_once(uri: str, tmp_path: Path) -> None:
    driver, objects = Driver(uri, tmp_path / "driver", 1), RunObjects(uri)
    driver.write("one")
    objects.ask("old.json", b"{}")
    driver.mirror.start()
    assert take(driver.path) == []  # of a run that was over
    objects.ask("1.json", b'{"verb": "drain", "region": "eu-west"}')
    objects.ask("1.json", b'{"verb": "drain", "region": "eu-west"}')
    eventually(lambda: (driver.path / "requests" / "1.json").exists(), "the request")
    assert [each.region for each in take(driver.path)] == ["eu-west"]
    driver.mirror.close()
    assert objects.take_requests() == {}


def test_a_damaged_object_is_told(uri: str, tmp_path: Path) -> None:
    driver, objects = Driver(uri, tmp_path / "driver", 1), RunObjects(uri)
    driver.write("one")
    driver.mirror.tick()
    (segment,) = objects.segments()
    objects._bucket.put(f"{objects._prefix}events/{segment.name}", b"something else")
    with pytest.raises(StoreError, match="cannot be read whole"):
        seen_copy(uri)


def test_a_run_that_is_not_there_is_told(uri: str) -> None:
    wrong = uri.replace("/run?", "/rum?")
    with pytest.raises(RunDirectoryError, match=r"there is no run s3://.*rum"):
        geo_ray.status(wrong)
    assert not copy_path(wrong, "seen").exists()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"steps": 2, "keep_best": {"metric": "loss", "mode": "min"}}}, "keep_best"),
        ({"run": {"dir": "s3://b/p", "driver": "actor"}}, "run.driver"),
        ({"run": {"dir": "s3://b/p?what=1"}}, "run.dir"),
    ],
)
def test_what_needs_a_directory_is_refused(tmp_path: Path, changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        experiment_of(tmp_path, **({"run": {"dir": "s3://b/p"}} | changes))


# ------------------------------------------------------------------ runs


def cli(machine: Path, *words: str) -> str:
    """A command on another machine: it shares the bucket, and nothing else."""
    place = machine.parent / "elsewhere"
    place.mkdir(exist_ok=True)
    environment = os.environ | {"XDG_CACHE_HOME": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", "geo_ray.cli.main", *words],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_watched_stopped_and_resumed_from_machines_that_share_nothing(
    ray_cluster: LocalCluster,
    endpoint: str,
    tmp_path: Path,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = final_digests(simulate(experiment_of(tmp_path), tmp_path).events)
    changes = {"run": {"dir": new_prefix(endpoint)}, "emulate": {"step_s": 1.0}}
    config: Experiment = experiment_of(tmp_path, **changes)
    asked: list[str] = []

    def sink(event: object) -> None:
        if getattr(event, "kind", "") == "step" and not asked:
            asked.append(f"{config.run.dir}".replace("?", "/tiny?"))
            cli(machine, "stop", asked[0])

    with pytest.raises(InterruptedRunError) as caught:
        geo_ray.train(config, on_event=sink, base_dir=tmp_path)
    (uri,) = asked
    assert uri in str(caught.value.fix)
    assert "a checkpoint" in cli(machine, "status", uri) or "checkpoint" in cli(
        machine, "status", uri
    )
    found = RunObjects(uri).lease().read(LEASE_KEY)
    assert found is not None and decode_record(found.data).released
    assert cli(machine, "report", uri).strip().endswith("report.html")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    done = geo_ray.train(resume=uri)
    assert done.finished and done.directory.address == uri
    assert final_digests([*done.events()]) == quiet
    seen = geo_ray.open_run(uri)
    assert seen.path != done.path and [*seen.events()] == [*done.events()]
    assert seen.summary == done.summary
    assert "finished" in cli(machine, "status", uri)
    for name, tensor in done.model().state_dict().items():
        assert tensor.equal(seen.model().state_dict()[name])
    with pytest.raises(RunFinishedError):
        geo_ray.train(resume=uri)
