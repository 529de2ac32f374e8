"""A served run on a real cluster whose averager is killed: its standby continues at once."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import geo_ray
from geo_ray.base.errors import ConfigError
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import SignedEndpoints
from geo_ray.telemetry.event_log import read_events
from tests.integration.joining.test_serve import CONFIG, START_S, serving
from tests.support.join_support import Loop, small_model, terms, train_all
from tests.support.join_support import serving as in_process

STEPS = 400


def await_events(run_path: Path, kind: str, count: int) -> None:
    """Wait until the log of a run has some events of a kind."""
    path, until_s = run_path / "events.jsonl", time.monotonic() + START_S
    while not path.exists() or [e.kind for e in read_events(path)].count(kind) < count:
        assert time.monotonic() < until_s, kind
        time.sleep(0.1)


def listening(root: int, port: int) -> int:
    """The process below another one that listens on a port."""
    for each in psutil.Process(root).children(recursive=True):
        if each.cmdline() and "AveragerActor" in each.cmdline()[0]:
            own = [c.laddr.port for c in each.net_connections() if c.status == psutil.CONN_LISTEN]
            if port in own:
                return each.pid
    raise AssertionError(f"no averager listens on port {port}")


@pytest.mark.slow  # starts a cluster
def test_killed_averagers_are_replaced(tmp_path: Path) -> None:
    """kill -9 of the averager and of the one that replaced it: loops continue, bits are equal."""
    (plain := tmp_path / "plain").mkdir()
    with in_process(terms(("eu", "us"), STEPS, strategy=CONFIG["strategy"]), plain) as (_, where):
        expected = train_all({name: Loop(where, name, plain).run for name in ("eu", "us")})
    changes = {
        "train": {"steps": STEPS},
        "averager": {"standby": "auto"},
        "checkpoint": {"every_s": None},
    }
    run_path, pause_s = tmp_path / "runs" / "served", [0.2]
    with serving(tmp_path, changes) as (process, address):
        addresses = [address]

        def kill() -> None:
            for count in (1, 2):
                await_events(run_path, "server_standby_ready", count)
                port = int(addresses[-1].rpartition(":")[2])
                os.kill(listening(process.pid, port), signal.SIGKILL)
                await_events(run_path, "server_replaced", count)
                addresses.append((run_path / "join" / "address").read_text().strip())
            pause_s[0] = 0.0

        def run(name: str) -> Any:
            loop = Loop(address, name, run_path / "join")
            return loop.run(lambda _: time.sleep(pause_s[0]))

        loops = {name: partial(run, name) for name in ("eu", "us")}
        found = train_all({**loops, "kill": kill})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        output, _ = process.communicate(timeout=START_S)
        assert process.returncode == 0, output
    for name in ("eu", "us"):
        assert torch.equal(found[name][0], expected[name][0])
    model = small_model()
    model.load_state_dict(load_file(run_path / "model.safetensors"))
    vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(vector, found["eu"][0])
    run = geo_ray.open_run(run_path)
    assert run.summary.steps == STEPS
    assert run.summary.samples == 2 * STEPS * 6
    assert run.summary.rounds == STEPS // 4
    assert len(set(addresses)) == 3 or addresses[0] != addresses[1]
    own = JoinCredentials.read(run_path / "join" / "eu.pem")
    data = (run_path / "join" / "eu.endpoints.json").read_bytes()
    assert SignedEndpoints.load(data, own.run_id, own.certificate.ca_pem).list.term == 3


def test_a_standby_of_joining_regions_is_in_the_cluster() -> None:
    assert geo_ray.load_config(CONFIG | {"averager": {"standby": "auto"}}).is_served
    with pytest.raises(ConfigError, match=r"averager\.standby.*: set auto"):
        geo_ray.load_config(CONFIG | {"averager": {"standby": "us"}})
    with pytest.raises(ConfigError, match=r"averager\.failover_s .*not supported"):
        geo_ray.load_config(CONFIG | {"averager": {"standby": "auto", "failover_s": 1.0}})
