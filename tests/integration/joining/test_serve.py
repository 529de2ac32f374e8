"""`geo-ray serve` on a real local cluster, and regions that join in threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

import geo_ray
from geo_ray.base.errors import ConfigError, ServerLostError
from geo_ray.joining.site import JoinedTraining
from geo_ray.runtime.serving import awaited_text, reach_note
from geo_ray.telemetry.event_log import read_events
from tests.support.join_support import Loop, small_model, terms, train_all
from tests.support.join_support import serving as in_process
from tests.support.train_support import eventually

START_S = 330.0
LONG = 200  # steps of a run that is killed, which are slow until then
CONFIG: dict[str, Any] = {
    "name": "served",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco", "interval": 4},
    "train": {"steps": 12},
    "serve": {"host": "127.0.0.1", "port": 0},
}


@contextmanager
def serving(
    folder: Path, changes: dict[str, Any] | None = None, *, resume: bool = False
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve `CONFIG` with changes in another process, or resume it; yields it and the address."""
    longest = {"cluster": {"kind": "local", "start_timeout_s": 300.0}}  # the machine may be busy
    (folder / "job.yaml").write_text(yaml.safe_dump(CONFIG | longest | (changes or {})))
    program = str(Path(sys.executable).with_name("geo-ray"))
    command = [program, "serve", "job.yaml", "--plain"]
    if resume:
        command = [program, "train", "--resume", "runs/served", "--plain"]
    path = folder / "runs" / "served" / "join" / "address"
    before_ns = path.stat().st_mtime_ns if path.exists() else 0
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        end_s = time.monotonic() + START_S
        while (
            not path.exists()
            or path.stat().st_mtime_ns == before_ns
            or not path.read_text().endswith("\n")
        ):
            assert process.poll() is None and time.monotonic() < end_s, process.communicate()[0]
            time.sleep(0.1)
        yield process, path.read_text().strip()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=START_S)


def test_regions_join_a_served_run(tmp_path: Path) -> None:
    run_path = tmp_path / "runs" / "served"
    with serving(tmp_path) as (process, address):
        loops = {name: Loop(address, name, run_path / "join").run for name in ("eu", "us")}
        found = train_all(loops)
        output, _ = process.communicate(timeout=START_S)
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert process.returncode == 0, output
    assert address in output
    assert (run_path / "join" / "eu.pem").stat().st_mode & 0o077 == 0
    model = small_model()
    model.load_state_dict(load_file(run_path / "model.safetensors"))
    vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(vector, found["eu"][0])
    assert torch.equal(vector, found["us"][0])
    run = geo_ray.open_run(run_path)
    assert run.summary.steps == 12
    assert run.summary.samples == 2 * 12 * 6
    assert run.summary.rounds == 3
    assert run.report_path.exists()


@dataclass
class Region:
    """A region whose loop is started again when the server is lost, as a job scheduler would."""

    address: str
    name: str
    folder: Path
    pause_s: float = 0.3
    starts: int = 0

    def run(self) -> torch.Tensor:
        loop = Loop(
            self.address,
            self.name,
            self.folder / "join",
            checkpoints=self.folder / "saved" / self.name,
        )
        while True:
            self.starts += 1
            try:
                return loop.run(lambda _: time.sleep(self.pause_s))[0]
            except ServerLostError:
                self.pause_s = 0.0


def await_checkpoint(run_path: Path) -> None:
    """Wait until the log of a run has a checkpoint."""
    path, until_s = run_path / "events.jsonl", time.monotonic() + START_S
    while not path.exists() or "checkpoint" not in {each.kind for each in read_events(path)}:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def averager_process(parent: int) -> int:
    """The process of the averager below another process."""
    found: list[int] = [
        each.pid
        for each in psutil.Process(parent).children(recursive=True)
        if each.cmdline() and "AveragerActor" in each.cmdline()[0]
    ]
    assert len(found) == 1, found
    return found[0]


def test_a_killed_averager_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """kill -9 of the averager: the regions' loops start again and end as without the failure."""
    (plain := tmp_path / "plain").mkdir()
    strategy = CONFIG["strategy"]
    with in_process(terms(("eu", "us"), LONG, strategy=strategy), plain) as (_, there):
        expected = train_all({name: Loop(there, name, plain).run for name in ("eu", "us")})
    run_path = tmp_path / "runs" / "served"
    changes = {"train": {"steps": LONG}, "checkpoint": {"every_s": 0.5}}
    with serving(tmp_path, changes) as (process, address):
        regions = {name: Region(address, name, run_path) for name in ("eu", "us")}

        def kill() -> None:
            await_checkpoint(run_path)
            os.kill(averager_process(process.pid), signal.SIGKILL)

        loops = {name: region.run for name, region in regions.items()}
        found = train_all({**loops, "kill": kill})
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0, output
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert [region.starts for region in regions.values()] == [2, 2], output
    for name in ("eu", "us"):
        assert torch.equal(found[name], expected[name][0])
    run = geo_ray.open_run(run_path)
    assert run.summary.steps == LONG
    events = list(read_events(run_path / "events.jsonl"))
    assert [event.kind for event in events].count("run_started") == 2
    assert [e.fields["step"] for e in events if e.kind == "checkpoint"][-1] == LONG


@pytest.mark.slow  # starts two clusters
def test_a_run_is_resumed_after_everything_was_killed(tmp_path: Path) -> None:
    """kill -9 of the serving process and its cluster; `geo-ray train --resume` continues."""
    run_path = tmp_path / "runs" / "served"
    changes = {"train": {"steps": LONG}, "checkpoint": {"every_s": 0.5}}
    with serving(tmp_path, changes) as (process, address):
        regions = {name: Region(address, name, run_path) for name in ("eu", "us")}

        def kill() -> None:
            await_checkpoint(run_path)
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            with serving(tmp_path, changes, resume=True) as (resumed, again):
                assert again == address
                output, _ = resumed.communicate(timeout=START_S)
                assert resumed.returncode == 0, output

        loops = {name: region.run for name, region in regions.items()}
        found = train_all({**loops, "kill": kill})
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert torch.equal(found["eu"], found["us"])
    assert geo_ray.open_run(run_path).summary.steps == LONG


@pytest.mark.slow  # starts two clusters
def test_ctrl_c_saves_and_the_run_is_resumed(tmp_path: Path) -> None:
    """Both loops end without an error at the same step, and continue there when started again."""
    run_path = tmp_path / "runs" / "served"
    changes = {"train": {"steps": LONG}, "checkpoint": {"every_s": 3600.0}}
    names = ("eu", "us")
    ends: dict[str, list[tuple[int, bool]]] = {name: [] for name in names}

    def loop_of(name: str, address: str, pause_s: float) -> Any:
        loop = Loop(address, name, run_path / "join", checkpoints=tmp_path / "saved" / name)

        def each(sync: JoinedTraining) -> None:
            time.sleep(pause_s)
            if sync.done:
                ends[name].append((sync.steps, sync.stopped))

        return lambda: loop.run(each)

    with serving(tmp_path, changes) as (process, address):

        def stop() -> None:
            path = run_path / "events.jsonl"
            eventually(
                lambda: path.exists() and any(e.kind == "exchange" for e in read_events(path)),
                "the run trains",
            )
            process.send_signal(signal.SIGINT)

        found = train_all({**{n: loop_of(n, address, 0.3) for n in names}, "stop": stop})
        output, _ = process.communicate(timeout=START_S)
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert process.returncode == 130, output
    assert "its state is saved" in output and "Traceback" not in output
    (at, stopped) = ends["eu"][0]
    assert ends == {name: [(at, True)] for name in names}
    assert stopped and 0 < at < LONG and at % 4 == 0
    kinds = [event.kind for event in read_events(run_path / "events.jsonl")]
    assert kinds.count("checkpoint") == 1 and "run_failed" in kinds
    with serving(tmp_path, changes, resume=True) as (process, again):
        found = train_all({n: loop_of(n, again, 0.0) for n in names})
        output, _ = process.communicate(timeout=START_S)
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert process.returncode == 0, output
    assert ends == {name: [(at, True), (LONG, False)] for name in names}
    assert torch.equal(found["eu"][0], found["us"][0])
    events = list(read_events(run_path / "events.jsonl"))
    steps = [each["step"] for each in events if each.kind == "step" and each["region"] == "eu"]
    assert steps == list(range(4, LONG + 1, 4))  # each once
    assert [each.kind for each in events].count("checkpoint") == 2  # one at the end


@pytest.mark.slow  # starts a cluster only to end it
def test_ctrl_c_before_the_regions_are_there(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, _):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode != 0
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": [{"name": "eu", "join": True}, {"name": "us"}]}, "us has neither"),
        ({"task": {"use": "digits"}}, "task .*: regions that join have their own"),
        ({"members": {"min": 3}}, r"members\.min .*the run has 2 regions"),
        ({"overlay": {"kind": "netstorm"}}, r"overlay .*not supported where regions join"),
        ({"checkpoint": {"retry_s": 5.0}}, r"checkpoint\.retry_s .*not supported"),
        ({"members": {"rejoin": False}}, r"members\.rejoin .*not supported"),
        ({"train": {"steps": 4, "clip_norm": 1.0}}, r"train\.clip_norm .*not supported"),
        (
            {
                "train": {
                    "steps": 4,
                    "patience": 1,
                    "keep_best": {"metric": "loss", "mode": "min"},
                    "eval_every": 2,
                }
            },
            r"train\.keep_best .*`train\.patience` watches the metric of `train\.target`",
        ),
        ({"emulate": {"step_s": 0.1}}, r"emulate .*not supported"),
        ({"codec": {"up": {"kind": "dgt"}}}, r"codec.up .*dgt is not supported"),
        (
            {"regions": [{"name": "eu", "join": True, "workers": 2}]},
            r"regions .*workers of 'eu': not supported",
        ),
        ({"strategy": {"kind": "bsp"}}, "'bsp' needs every gradient of a region"),
    ],
)
def test_configurations_that_cannot_be_served(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        geo_ray.serve(CONFIG | changes)


def test_regions_that_are_awaited_are_named() -> None:
    unix_s = time.mktime((2026, 11, 28, 14, 3, 20, 0, 0, -1))
    awaited = {"us": (5.0, "its process was killed"), "ap": (5.0, None), "eu": (60.0, None)}
    assert awaited_text(awaited, 65.0, unix_s, 600.0) == (
        "waiting for region 'ap' since 14:02:20 (the others have sent their updates): see whether "
        "its loop still steps; waiting for region 'us' since 14:02:20 (it was lost: its process "
        "was killed): start its loop again within 600 s (members.wait_s)"
    )
    assert awaited_text({}, 65.0, unix_s, 600.0) == ""


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("geo-ray://127.0.0.2:7447", True),
        ("geo-ray://localhost:7447", True),
        ("geo-ray://[::1]:7447", True),
        ("geo-ray://10.0.0.5:7447", False),
        ("geo-ray://run.example.org:7447", False),
    ],
)
def test_an_address_that_other_machines_cannot_reach(address: str, warns: bool) -> None:
    assert ("set serve.advertise" in reach_note(address)) is warns


@pytest.mark.parametrize(
    "changes",
    [
        {"members": {"min": 2, "wait_s": 5.0}, "serve": {"lost_after_s": 5.0}},
        {
            "train": {
                "steps": 4,
                "eval_every": 2,
                "target": {"metric": "loss", "value": 0.1, "direction": "at_most"},
            }
        },
        {"codec": {"up": {"kind": "int8"}}, "seed": 3, "transport": {"max_streams": 2}},
    ],
)
def test_configurations_that_can_be_served(changes: dict[str, Any]) -> None:
    assert geo_ray.load_config(CONFIG | changes).is_served


def test_a_configuration_without_joining_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "regions": [{"name": "eu"}],
    }
    with pytest.raises(ConfigError, match="no region of this configuration joins"):
        geo_ray.serve({k: v for k, v in CONFIG.items() if k != "serve"} | own)
