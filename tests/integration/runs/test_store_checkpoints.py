"""Runs whose checkpoints lie in an object store, behind a real S3 server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import geo_ray
from geo_ray.base.errors import (
    CheckpointConflictError,
    CheckpointError,
    ConfigChangedError,
    StoreError,
)
from geo_ray.base.files import save_text
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.checkpoints import has_checkpoint, places_of, store_of
from geo_ray.runs.resume import check_resumable
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.run_context import Reporting
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.places import CheckpointPlaces, StoreRegions
from geo_ray.storage.uri import s3_uri
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.summary import load_summary
from geo_ray.training.parameters import digest
from tests.support.region_support import InProcess
from tests.support.region_support import eventually as soon
from tests.support.region_support import experiment_of as tiny
from tests.support.s3_support import (
    Proxy,
    client_of,
    new_bucket,
    new_prefix,
    proxy_before,
    s3_server,
    set_credentials,
)
from tests.support.train_support import (
    Trained,
    count,
    eventually,
    experiment_of,
    final_digests,
    losses,
    run_here,
    simulate,
    write_config,
)

DIGEST = "d" * 64
LONG_S = 60.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@pytest.fixture
def proxy(endpoint: str) -> Iterator[Proxy]:
    with proxy_before(endpoint) as made:
        yield made


def saver_of(places: CheckpointPlaces, experiment: Experiment) -> Saver:
    store = CheckpointStore(places.root(), 2)
    return Saver(store, experiment, DIGEST, attempt=1, health=LossHealth())


def save(world: InProcess, saver: Saver) -> int:
    """Take a checkpoint of regions that stand still; its size."""
    checkpoint = saver.begin()
    for site in world.sites.values():
        if world.experiment.averager_region == site.region.name:
            assert site.bridge is not None
            assert site.bridge.path.request_checkpoint(checkpoint, halt=False)
    for site in world.sites.values():
        site.primary.snapshot(checkpoint, halt=False)

    def told() -> int | None:
        for site in world.sites.values():
            for event in site.event_buffer.take(100_000):
                if event["kind"] == "part_failed" and event["id"] == checkpoint:
                    raise event["error"]
                if event["kind"] == "parts" and event["id"] == checkpoint:
                    saver.add(checkpoint, event["parts"], event["step"])
        return saver.committed(0.1)

    return int(soon(told, "a checkpoint"))


# ------------------------------------------------------------------ regions in threads


def test_regions_write_their_parts_to_the_store_of_their_own(tmp_path: Path, endpoint: str) -> None:
    regions = [{"name": "us-east"}, {"name": "eu-west", "ps_shards": 2}]
    asked = tiny(regions=regions)
    places = CheckpointPlaces(new_prefix(endpoint), {"eu-west": new_prefix(endpoint)})
    with InProcess(asked, tmp_path, places=places) as world:
        digests = world.run()
        saver = saver_of(places, world.experiment)
        size = save(world, saver)
        found = CheckpointStore(places.root()).latest()
    assert size == sum(part.bytes for part in found.manifest.parts)
    for name, shards, expected in zip(("us-east", "eu-west"), (1, 2), digests, strict=True):
        held = [found.read(f"{name}-ps{i}")[0]["params"] for i in range(shards)]
        assert digest(torch.cat(held)) == expected
    assert not (tmp_path / "checkpoints").exists()
    crossed = StoreRegions("eu-west", places.regions).saved(saver.parts, "us-east")
    sizes = CheckpointStore(places.root())._root.folder(0).sizes()
    sent = sizes["us-east-ps0.safetensors"] + sizes["averager.safetensors"]
    assert crossed == {("us-east", "eu-west"): sent}  # if the store of all was in eu-west
    own = CheckpointStore(CheckpointPlaces(places.regions["eu-west"]).root())
    assert own._root.ids() == {0: False}  # parts there, the manifest elsewhere
    assert sorted(own._root.folder(0).sizes()) == ["eu-west-ps0.safetensors",
                                                   "eu-west-ps1.safetensors"]  # fmt: skip


def test_a_store_that_fails_for_a_while_costs_one_checkpoint(
    tmp_path: Path, endpoint: str, proxy: Proxy
) -> None:
    bucket = new_bucket(endpoint)
    places = CheckpointPlaces(s3_uri(bucket, "p", endpoint_url=proxy.endpoint, region="us-east-1"))
    with InProcess(tiny(), tmp_path, places=places) as world:
        world.run()
        saver = saver_of(places, world.experiment)
        save(world, saver)
        proxy.trouble = lambda r: "403" if r.method == "PUT" else None
        with pytest.raises(StoreError, match="refused to create"):
            save(world, saver)
        saver.abandon()
        proxy.trouble = lambda r: None
        save(world, saver)
        saver.close()
    assert CheckpointStore(places.root()).ids() == [0, 2]


# ------------------------------------------------------------------ the saver


def test_who_watches_the_run_never_waits_for_the_store(endpoint: str, proxy: Proxy) -> None:
    """Requests that are held back until the end of the test: whoever waited would wait for ever."""
    bucket = new_bucket(endpoint)
    places = CheckpointPlaces(s3_uri(bucket, "p", endpoint_url=proxy.endpoint, region="us-east-1"))
    saver = saver_of(places, tiny(regions=[{"name": "eu"}]))
    may_go = threading.Event()

    def hold(request: Any) -> None:
        assert may_go.wait(LONG_S)

    proxy.trouble = hold
    first = saver.begin()
    saver.abandon()
    second = saver.begin()
    assert second == first + 1 and saver.open_id == second
    assert saver.committed() is None
    saver.abandon()
    may_go.set()
    saver.close()
    listed = client_of(endpoint).list_objects_v2(Bucket=bucket)
    assert "Contents" not in listed, "what was given up has left something"


def test_a_second_writer_ends_the_run_of_the_first(tmp_path: Path, endpoint: str) -> None:
    places = CheckpointPlaces(new_prefix(endpoint))
    with InProcess(tiny(), tmp_path, places=places) as world:
        world.run()
        saver = saver_of(places, world.experiment)
        save(world, saver)
        other = CheckpointStore(places.root())
        other.begin(other.next_id())  # the same number as the next one here
        with pytest.raises(CheckpointConflictError):
            save(world, saver)
        saver.abandon()
        saver.close()
        assert other._root.owner(1) == "self"


# ------------------------------------------------------------------ runs


def experiment_in_store(directory: Path, endpoint: str, **sections: Any) -> Experiment:
    return experiment_of(
        directory,
        checkpoint={"every_s": 0.5, "store": new_prefix(endpoint)},
        **sections,
    )


def test_a_run_has_a_folder_of_its_name(tmp_path: Path, endpoint: str) -> None:
    experiment = experiment_in_store(tmp_path, endpoint)
    run = rundir.create(experiment, tmp_path)
    again = rundir.create(experiment, tmp_path)
    assert "some/prefix/tiny?" in places_of(run, experiment.checkpoint).main
    assert "some/prefix/tiny-2?" in places_of(again, experiment.checkpoint).main
    assert rundir.reopen(run.path) == (run, experiment)


def test_a_new_run_does_not_take_the_place_of_another(tmp_path: Path, endpoint: str) -> None:
    experiment = experiment_in_store(tmp_path, endpoint)
    run = rundir.create(experiment, tmp_path)
    assert not has_checkpoint(run.path)
    saved_by_another(run, experiment)
    assert has_checkpoint(run.path)
    reporting = Reporting(RunObserver(), 0.0)
    with pytest.raises(CheckpointError, match="of another run") as caught:
        run_here(experiment, run, reporting)
    assert "checkpoint.store" in caught.value.fix


def saved_by_another(run: rundir.RunDirectory, experiment: Experiment) -> None:
    folder = store_of(run, experiment.checkpoint).begin(0)
    folder.write("manifest.json", [b"{}"], 2)


def test_a_resume_stays_with_the_stores_of_the_run(tmp_path: Path, endpoint: str) -> None:
    experiment = experiment_in_store(tmp_path, endpoint)
    run = rundir.create(experiment, tmp_path)
    save_text(run.path / "events.jsonl", "")
    saved_by_another(run, experiment)
    moved = experiment.checkpoint.model_copy(update={"store": "s3://elsewhere/p"})
    wanted = experiment.model_copy(update={"checkpoint": moved})
    with pytest.raises(ConfigChangedError, match=r"checkpoint\.store is s3://elsewhere"):
        check_resumable(run, experiment, wanted)


def check_crossed(run: rundir.RunDirectory, experiment: Experiment, events: list[Event]) -> None:
    """The store is where the averager is: the other region's part crosses, here and back."""
    told = [e for e in events if e.kind == "wan" and "checkpoint" in e["bytes_by_class"]]
    read, *saved = [(e["src"], e["dst"], e["bytes_by_class"]["checkpoint"]) for e in told]
    parts = store_of(run, experiment.checkpoint).latest().manifest.parts
    (size,) = (part.bytes for part in parts if part.name == "eu-west-ps0")
    assert read[:2] == ("us-east", "eu-west") and read[2] > 0
    assert {link[:2] for link in saved} == {("eu-west", "us-east")}
    assert len(saved) == sum(e.kind == "checkpoint" for e in events)
    sums = [0, *(total for _, _, total in saved)]
    assert sums[-1] - sums[-2] == size


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed_from_the_store_to_the_bit(tmp_path: Path, endpoint: str) -> None:
    """Real actors on a cluster of their own; the whole command, cut off by SIGKILL."""
    experiment = experiment_in_store(
        tmp_path,
        endpoint,
        train={"steps": 16, "eval_every": 8, "step_timeout_s": 60},
        emulate={"step_s": 0.25},
        cluster={"kind": "local"},
    )
    run_dir = Path(experiment.run.dir) / experiment.name
    config, log = write_config(tmp_path, experiment), tmp_path / "said.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "geo_ray.cli.main", "train"]
        process = subprocess.Popen(
            [*command, str(config), "--plain"], stdout=output, stderr=output, cwd=tmp_path
        )
        try:
            eventually(
                lambda: count(run_dir, "checkpoint") >= 2 or process.poll() is not None,
                "two checkpoints",
            )
            assert process.poll() is None, log.read_text()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
        before = count(run_dir, "step")
        assert before < 2 * 16
        listed = geo_ray.checkpoints(run_dir).to_pylist()
        assert listed and {row["state"] for row in listed} == {"healthy"}
        shown = CliRunner().invoke(root, ["checkpoints", str(run_dir)])
        assert "healthy" in shown.output and "us-east, eu-west" in shown.output
        resumed = subprocess.run(
            [*command, "--resume", str(run_dir), "--plain"],
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            timeout=300,
            check=False,
        )
    assert resumed.returncode == 0, log.read_text()
    assert not (run_dir / "checkpoints").exists()
    run, reread = rundir.reopen(run_dir)
    assert reread == experiment
    summary, undisturbed = load_summary(run_dir), simulate(experiment, tmp_path)
    assert summary is not None
    done = Trained(run, summary)
    assert summary.digest == undisturbed.summary.digest
    assert final_digests(done.events) == {summary.digest}
    assert losses(done.events) == losses(undisturbed.events)
    _, restarted = (i for i, e in enumerate(done.events) if e.kind == "run_started")
    assert min(e["step"] for e in done.events[restarted:] if e.kind == "step") > 1
    check_crossed(run, experiment, done.events[restarted:])
    # The end is saved, too, and its model is that of the run.
    parameters = list(geo_ray.open_run(run_dir).model().parameters())
    saved = geo_ray.open_run(run_dir).model(geo_ray.checkpoints(run_dir).to_pylist()[-1]["id"])
    assert all(torch.equal(a, b) for a, b in zip(parameters, saved.parameters(), strict=True))
