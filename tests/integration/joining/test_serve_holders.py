"""A served run on a real cluster whose averagers are in several processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import geo_ray
from geo_ray.joining.site import JoinedTraining
from geo_ray.telemetry.event_log import read_events
from tests.integration.joining.test_serve import (
    CONFIG,
    LONG,
    START_S,
    Region,
    await_checkpoint,
    serving,
)
from tests.integration.joining.test_serve_standby import await_events, listening
from tests.support.join_support import Loop, small_model, terms, train_all
from tests.support.join_support import serving as in_process
from tests.support.train_support import eventually

STEPS = 24


def holders(parent: int) -> list[int]:
    """The processes of holders below another process."""
    return [
        each.pid
        for each in psutil.Process(parent).children(recursive=True)
        if each.cmdline() and "HolderActor" in each.cmdline()[0]
    ]


@pytest.mark.slow  # starts a cluster
def test_a_killed_holder_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """kill -9 of one of two holders: the loops start again and end as without the failure."""
    (plain := tmp_path / "plain").mkdir()
    strategy = CONFIG["strategy"]
    with in_process(terms(("eu", "us"), LONG, strategy=strategy), plain) as (_, there):
        expected = train_all({name: Loop(there, name, plain).run for name in ("eu", "us")})
    run_path = tmp_path / "runs" / "served"
    changes = {
        "train": {"steps": LONG},
        "checkpoint": {"every_s": 0.5},
        "serve": CONFIG["serve"] | {"holders": 3},
    }
    with serving(tmp_path, changes) as (process, address):
        regions = {name: Region(address, name, run_path) for name in ("eu", "us")}

        def kill() -> None:
            await_checkpoint(run_path)
            first, second = holders(process.pid)
            os.kill(max(first, second), signal.SIGKILL)

        loops = {name: region.run for name, region in regions.items()}
        found = train_all({**loops, "kill": kill})
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0, output
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert [region.starts for region in regions.values()] == [2, 2]
    for name in ("eu", "us"):
        assert torch.equal(found[name], expected[name][0])
    model = small_model()
    model.load_state_dict(load_file(run_path / "model.safetensors"))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), found["eu"])
    assert geo_ray.open_run(run_path).summary.steps == LONG
    kinds = [event.kind for event in read_events(run_path / "events.jsonl")]
    assert kinds.count("run_started") == 2


@pytest.mark.slow  # starts a cluster
def test_a_server_that_is_killed_in_a_round_of_several_holders_is_replaced(tmp_path: Path) -> None:
    """kill -9 when both have taken in the update of one region: bits are equal at the end."""
    (plain := tmp_path / "plain").mkdir()
    run = terms(("eu", "us"), STEPS, strategy=CONFIG["strategy"])
    with in_process(run, plain) as (_, there):
        expected = train_all({name: Loop(there, name, plain).run for name in ("eu", "us")})
    run_path = tmp_path / "runs" / "served"
    changes = {
        "train": {"steps": STEPS},
        "checkpoint": {"every_s": None},
        "serve": CONFIG["serve"] | {"holders": 2},
        "averager": {"standby": "auto"},
    }
    with serving(tmp_path, changes) as (process, address):

        def each(sync: JoinedTraining) -> None:
            if sync.steps != 11:
                return
            await_events(run_path, "server_standby_ready", 1)
            eventually(lambda: steps_of(run_path, "eu") == 12, "the update of eu is taken in")
            os.kill(listening(process.pid, int(address.rpartition(":")[2])), signal.SIGKILL)
            await_events(run_path, "server_replaced", 1)

        loops = {name: Loop(address, name, run_path / "join") for name in ("eu", "us")}
        found = train_all({"eu": loops["eu"].run, "us": partial(loops["us"].run, each)})
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0, output
    for name in ("eu", "us"):
        assert not isinstance(found[name], Exception), found[name]
        assert torch.equal(found[name][0], expected[name][0])
    model = small_model()
    model.load_state_dict(load_file(run_path / "model.safetensors"))
    vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(vector, found["eu"][0])
    summary = geo_ray.open_run(run_path).summary
    assert (summary.steps, summary.samples, summary.rounds) == (STEPS, 2 * STEPS * 6, STEPS // 4)
    kinds = [event.kind for event in read_events(run_path / "events.jsonl")]
    assert (kinds.count("run_started"), kinds.count("server_replaced")) == (1, 1)


def steps_of(run_path: Path, region: str) -> int:
    """The steps of a region in the log of a run."""
    events = read_events(run_path / "events.jsonl")
    return max((e["step"] for e in events if e.kind == "step" and e["region"] == region), default=0)
