"""`geo-ray serve` on a real local cluster, and regions that join in threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import geo_ray
from geo_ray.base.errors import ConfigError
from tests.support.join_support import Loop, small_model, train_all

START_S = 180.0
CONFIG: dict[str, Any] = {
    "name": "served",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco", "interval": 4},
    "train": {"steps": 12},
    "serve": {"host": "127.0.0.1", "port": 0},
}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve `CONFIG` in another process; yields it and the address."""
    (folder / "job.yaml").write_text(yaml.safe_dump(CONFIG))
    program = str(Path(sys.executable).with_name("geo-ray"))
    command = [program, "serve", "job.yaml", "--plain"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        path, end_s = folder / "runs" / "served" / "join" / "address", time.monotonic() + START_S
        while not path.exists() or not path.read_text().endswith("\n"):
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
        ({"regions": [{"name": "eu", "join": True}, {"name": "us"}]}, "either all regions join"),
        ({"task": {"use": "digits"}}, "task .*: regions that join have their own"),
        ({"overlay": {"kind": "netstorm"}}, r"overlay .*not supported where regions join"),
        ({"checkpoint": {"every_s": 5.0}}, r"checkpoint\.every_s .*not supported"),
        ({"members": {"min": 1}}, r"members\.min .*not supported"),
        ({"train": {"steps": 4, "clip_norm": 1.0}}, r"train\.clip_norm .*not supported"),
        ({"emulate": {"step_s": 0.1}}, r"emulate .*not supported"),
        ({"codec": {"up": {"kind": "dgt"}}}, r"codec.up \(dgt\): not supported"),
        (
            {"regions": [{"name": "eu", "join": True, "workers": 2}]},
            r"regions\.eu\.workers.*not supported",
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


@pytest.mark.parametrize(
    "changes",
    [
        {"members": {"wait_s": 5.0}},
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
