"""Regions that are process groups, on a real local cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import geo_ray
from geo_ray.base.errors import LoopFailedError, RankLostError, RankOutOfMemoryError
from geo_ray.data.manifest import load_manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.runs.data import open_readers
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from tests.support.pages import ROOT, commands, save

PAGE = "docs/guides/groups.md"
ERRORS = (RankLostError, RankOutOfMemoryError, LoopFailedError)


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(PAGE)
    named = set(re.findall(r"^\| `([A-Z_]+)`", (ROOT / PAGE).read_text(), flags=re.M))
    assert named == {each.code for each in ERRORS}
    assert commands(PAGE) == ["geo-ray train groups.yaml"]
    run = geo_ray.train("groups.yaml")
    assert run.summary.steps == 12
    assert run.summary.samples == 2 * 2 * 12 * 8
    assert run.summary.rounds == 3
    found = load_file(run.model_path)
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "0.weight": (16, 8),
        "0.bias": (16,),
        "2.weight": (2, 16),
        "2.bias": (2,),
    }
    assert all(torch.isfinite(each).all() for each in found.values())
    events = list(read_events(run.path / EVENTS_FILE))
    kinds = [event.kind for event in events]
    assert kinds.count("step") == 6
    first = {event["region"]: event["loss"] for event in reversed(events) if event.kind == "step"}
    assert first["eu"] != first["us"]  # each rank has its own rows
    assert "region_lost" not in kinds and "worker_lost" not in kinds
    assert run.report_path.exists()


def is_training(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended
        return "GroupRankActor.train" in " ".join(process.cmdline())
    return False


STEPS, INTERVAL, ROWS, CLIP, LR = 8, 4, 8, 1.0, 0.01
MANY = 48
TASK: dict[str, Any] = {
    "name": "task",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {}, "batch_size": ROWS},
    "optimizer": {"kind": "adamw", "lr": LR, "schedule": {"kind": "linear", "warmup_steps": 2}},
    "strategy": {
        "kind": "diloco",
        "interval": INTERVAL,
        "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.5},
    },
    "train": {"steps": STEPS, "eval_every": INTERVAL, "clip_mean_norm": CLIP},
}
TWO = {"ranks_per_node": 2, "cpus_per_rank": 0.5}
GROUPS: dict[str, Any] = {
    "regions": [
        {"name": "eu", "group": TWO},
        {"name": "us", "group": TWO | {"sharding": "ddp"}},
    ],
    "serve": {"port": 0},
}


def warm_and_linear(step: int) -> float:
    return (step + 1) / 2 if step < 2 else 1 - 0.9 * (step - 2) / (STEPS - 2)


def plain_diloco(
    task: Task,
    readers: dict[str, RegionReader],
    steps: int = STEPS,
    schedule: Callable[[int], float] = warm_and_linear,
) -> nn.Module:
    """DiLoCo in plain PyTorch: a step of a region has the rows of both of its ranks."""
    models = {name: task.model(0) for name in readers}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=LR) for name, model in models.items()
    }
    outer = nn.utils.parameters_to_vector(models["eu"].parameters()).detach()
    momentum = torch.zeros_like(outer)
    for step in range(steps):
        for name, model in models.items():
            columns = readers[name].read(step * 2 * ROWS, 2 * ROWS)
            optimizers[name].zero_grad()
            batch = task.collate(columns, torch.device("cpu"))
            nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizers[name].param_groups[0]["lr"] = LR * schedule(step)
            optimizers[name].step()
        if (step + 1) % INTERVAL == 0:
            ends = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models.values()]
            delta = sum(outer - end for end in ends) / len(ends)
            momentum = 0.5 * momentum + delta
            outer = outer - 0.7 * (delta + 0.5 * momentum)
            for model in models.values():
                nn.utils.vector_to_parameters(outer.clone(), model.parameters())
    return models["eu"]


@pytest.mark.slow
def test_a_task_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = geo_ray.train(TASK | GROUPS)
    assert run.summary.samples == 2 * 2 * STEPS * ROWS
    task = load_task(run.experiment.task, tmp_path)
    manifest = load_manifest(str(run.path / "data" / "manifest.json"))
    readers = {name: open_readers(run.experiment, manifest, name) for name in ("eu", "us")}
    expected = plain_diloco(task, {name: train for name, (train, _) in readers.items()})
    found = load_file(run.model_path)
    before = task.model(0).state_dict()
    for name, value in expected.state_dict().items():
        assert float((value - before[name]).abs().max()) > 1e-3
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
    # the evaluation is that of all held-out rows of both regions
    rows = [columns for _, heldout in readers.values() for columns in heldout.scan(10**6)]
    right = total = 0
    model = run.model()
    for columns in rows:
        batch = task.collate(columns, torch.device("cpu"))
        right += int((model(batch.inputs).argmax(1) == batch.labels).sum())
        total += len(batch.labels)
    assert run.summary.eval["accuracy"] == pytest.approx(right / total)
    (last,) = [e for e in run.events("eval") if e["region"] is None and e["final"]]
    assert last["samples"] == total
    # a simulation computes the same, with separate workers
    simulated = geo_ray.simulate(TASK | GROUPS, {"name": "simulated"})
    for name, value in load_file(simulated.model_path).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


SLOW = """
import time
from geo_ray.data.tasks.digits import Digits

class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.1)
        return super().loss(model, batch)
"""


@pytest.mark.slow
def test_groups_that_are_all_lost_continue_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    killed: list[int] = []

    def on_event(event: geo_ray.Event) -> None:
        if event.kind == "checkpoint" and not killed:
            ranks = [
                process
                for process in psutil.Process().children(recursive=True)
                if is_training(process)
            ]
            killed.extend(process.pid for process in ranks)
            for process in ranks:
                process.kill()

    changes = {
        "task": {"use": "slow.py:Slow", "options": {"width": 2}},
        "train": TASK["train"] | {"steps": MANY},
        "optimizer": {"kind": "adamw", "lr": LR},
        "checkpoint": {"every_s": 1.0},
    }
    run = geo_ray.train(TASK | GROUPS | changes, on_event=on_event)
    assert len(killed) == 4
    starts = run.events("run_started")
    assert len(starts) == 2
    assert 0 < starts[1]["resumed_step"] < MANY
    task = load_task(run.experiment.task, tmp_path)
    manifest = load_manifest(str(run.path / "data" / "manifest.json"))
    readers = {name: open_readers(run.experiment, manifest, name)[0] for name in ("eu", "us")}
    expected = plain_diloco(task, readers, MANY, lambda _: 1.0)
    found = load_file(run.model_path)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
