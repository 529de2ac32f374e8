"""Whole runs on real actors of the shared cluster."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from geo_ray.api.run import open_run
from geo_ray.base.errors import InterruptedRunError
from geo_ray.base.load import digest, load_tree
from geo_ray.cli.ending import show_end
from geo_ray.data.manifest import load_manifest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs import directory, requests
from geo_ray.runs.data import open_readers
from geo_ray.runs.evaluation import sum_of
from geo_ray.runs.requests import Interruption
from geo_ray.telemetry.events import EVENT_FIELDS, Event
from geo_ray.telemetry.summary import load_summary
from geo_ray.training.parameters import digest as digest_of
from geo_ray.training.parameters import read_parameters
from tests.support.tensorboard_support import tensorboard_values
from tests.support.train_support import (
    Trained,
    books_of,
    events_of,
    experiment_of,
    final_digests,
    losses,
    simulate,
    train,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_HELDOUT = 364
BATCH = 16

USER_TASK = '''
"""A user's task with dropout: real randomness that must be the same wherever it runs."""
import numpy as np
import torch
from torch import nn
import geo_ray
from geo_ray.data.tasks.base import Dataset


class Line:
    class Options(geo_ray.Options):
        noise: float = 0.1

    columns = {"x": "float32[3]", "y": "float32"}
    label_column = None

    def __init__(self, options):
        self.noise = options.noise

    def model(self, seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def collate(self, columns, device):
        return torch.tensor(columns["x"]), torch.tensor(columns["y"])

    def loss(self, model, batch):
        x, y = batch
        return ((model(x)[:, 0] - y) ** 2).mean()

    def evaluate(self, model, batch):
        x, y = batch
        error = float(((model(x)[:, 0] - y) ** 2).sum())
        return {"error": np.array([error]), "rows": np.array([float(len(y))])}

    def metrics(self, stats):
        return {"mse": float(stats["error"][0] / stats["rows"][0])}

    def dataset(self, seed):
        random = np.random.default_rng(seed)
        def part(n):
            x = random.normal(size=(n, 3)).astype(np.float32)
            y = x @ np.array([1.0, -2.0, 0.5], np.float32)
            return {"x": x, "y": (y + self.noise * random.normal(size=n)).astype(np.float32)}
        return Dataset(part(300), part(60))
'''


@pytest.fixture(scope="module")
def rich(ray_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three regions of unequal size, two shards in one, links with an outage, checkpoints."""
    base = tmp_path_factory.mktemp("rich")
    experiment = experiment_of(
        base,
        regions=[
            {"name": "us-east", "workers": 2, "ps_shards": 2},
            {"name": "eu-west"},
            {"name": "ap-south"},
        ],
        train={"steps": 10, "eval_every": 4, "step_timeout_s": 60},
        averager={"region": "eu-west"},
        checkpoint={"every_s": 0.5},
        emulate={
            "step_s": 0.15,
            "link": {"rate_mbps": 200, "delay_s": 0.002},
            "links": [{"src": "ap-south", "dst": "eu-west", "outages": [[0.2, 1.2]]}],
        },
        observe={
            "export": [
                {"kind": "tensorboard", "dir": "curves", "every_s": 0},
                {"kind": "otlp", "endpoint": "http://127.0.0.1:9/v1/traces", "timeout_s": 0.5},
            ]
        },
    )
    return train(experiment, base)


def experiment_in(run: Trained) -> Experiment:
    return load_tree(run.run.path / "config.lock.yaml", [], Experiment)


# ------------------------------------------------------------------ one rich run


def test_sma_equals_the_simulator_to_the_bit(rich: Trained, tmp_path: Path) -> None:
    """Outage, shards and checkpoints change times, and nothing else."""
    experiment = experiment_in(rich)
    run = experiment.run.model_copy(update={"dir": str(tmp_path)})
    simulated = simulate(experiment.model_copy(update={"run": run}), rich.run.base_dir)
    assert simulated.summary.digest == rich.summary.digest
    assert final_digests(rich.events) == {rich.summary.digest}
    assert losses(simulated.events) == losses(rich.events)


def test_other_regions_are_notified_during_a_round(rich: Trained) -> None:
    """The curves are complete, although the trace collector does not answer."""
    values = tensorboard_values(rich.run.base_dir / "curves")
    for region in ("us-east", "eu-west", "ap-south"):
        told = [(event["step"], event["loss"]) for event in rich.of("step")
                if event["region"] == region]  # fmt: skip
        assert [step for step, _ in values[f"loss/{region}"]] == [step for step, _ in told]
        assert [v for _, v in values[f"loss/{region}"]] == pytest.approx([v for _, v in told])


def test_the_run_directory_is_complete(rich: Trained) -> None:
    path = rich.run.path
    show_end(open_run(path))
    found = {file.name for file in path.iterdir() if file.suffix != ".lock"}
    assert found == {
        "lease.json",
        "run_id",
        "config.lock.yaml",
        "plan.json",
        "events.jsonl",
        "checkpoints",
        "data",
        "report.html",
        "summary.json",
        "model.safetensors",
    }
    assert digest(experiment_in(rich)) == rich.of("run_started")[0]["digest"]
    plan = json.loads((path / "plan.json").read_text())
    assert plan["averager_region"] == "eu-west"
    assert [region["workers"] for region in plan["regions"]] == [2, 1, 1]
    assert load_summary(path) == rich.summary
    assert "ap-south" in (path / "report.html").read_text()


def test_the_model_file_has_the_evaluated_accuracy(rich: Trained) -> None:
    experiment = experiment_in(rich)
    task = load_task(experiment.task, rich.run.base_dir)
    module = task.model(99)
    load_model(module, str(rich.run.model))
    assert digest_of(read_parameters(module)) == rich.summary.digest
    manifest = load_manifest(str(Path(rich.run.data) / "manifest.json"))
    stats = []
    module.eval()
    for region in experiment.region_names:
        _, heldout = open_readers(experiment, manifest, region)
        with torch.no_grad():
            for columns in heldout.scan(256):
                stats.append(task.evaluate(module, task.collate(columns, torch.device("cpu"))))
    total = {name: sum_of([s[name] for s in stats]) for name in stats[0]}
    assert task.metrics(total)["accuracy"] == rich.summary.eval["accuracy"]


def test_events_describe_the_whole_run(rich: Trained) -> None:
    events = rich.events
    assert {event.kind for event in events} <= set(EVENT_FIELDS)
    assert events[0].kind == "run_started"
    assert events[-1].kind == "run_finished"
    steps = Counter((e["region"], e["step"]) for e in rich.of("step"))
    assert steps == {(r, n): 1 for r in ("us-east", "eu-west", "ap-south") for n in range(1, 11)}
    exchanges = Counter((e["region"], e["round"]) for e in rich.of("exchange"))
    assert exchanges == {(r, n): 1 for r in ("us-east", "eu-west", "ap-south") for n in range(1, 6)}
    evals = [(e["region"], e["step"], e["samples"]) for e in rich.of("eval") if e["region"] is None]
    assert evals == [(None, 4, NUM_HELDOUT), (None, 8, NUM_HELDOUT), (None, 10, NUM_HELDOUT)]
    assert rich.of("run_finished")[0]["summary"]["digest"] == rich.summary.digest


def test_books_balance(rich: Trained) -> None:
    per_step = {"us-east": 2 * BATCH, "eu-west": BATCH, "ap-south": BATCH}
    assert {(e["region"], e["samples"]) for e in rich.of("step")} == set(per_step.items())
    assert rich.summary.samples == 10 * sum(per_step.values())
    step = rich.of("checkpoint")[-1]["step"]
    books = books_of(rich.run)
    assert {r: b.applied for r, b in books.items()} == {r: step * n for r, n in per_step.items()}


def test_every_byte_between_regions_is_booked(rich: Trained) -> None:
    sent = {(e["src"], e["dst"]): e["bytes_by_class"] for e in rich.of("wan")}  # the last counts
    model_bytes = sum(e["bytes_sent"] for e in rich.of("exchange") if e["region"] == "ap-south")
    for region in ("us-east", "ap-south"):
        assert sent[region, "eu-west"]["update"] >= model_bytes
        assert sent["eu-west", region]["reply"] >= model_bytes
    assert ("us-east", "ap-south") not in sent
    total = Counter()
    for by_class in sent.values():
        total.update(by_class)
    assert rich.summary.wan_bytes == dict(total)


# ------------------------------------------------------------------ other strategies


@pytest.mark.slow
def test_bsp_with_a_users_file_equals_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "line.py").write_text(USER_TASK)
    experiment = experiment_of(
        tmp_path,
        task={"use": "tasks/line.py:Line", "options": {"noise": 0.2}},
        strategy={"kind": "bsp"},
        optimizer={"kind": "adamw", "lr": 0.01},
        regions=[{"name": "us-east"}, {"name": "eu-west", "workers": 2}],
    )
    real = train(experiment, tmp_path)
    simulated = simulate(experiment, tmp_path)
    assert final_digests(real.events) == {simulated.summary.digest} == {real.summary.digest}
    assert losses(real.events) == losses(simulated.events)
    assert real.summary.eval == simulated.summary.eval


@pytest.mark.slow
def test_a_round_may_travel_over_an_overlay(tmp_path: Path) -> None:
    """Over bridges that are actors, with certificates of the run, in regions of a cluster."""
    regions = [{"name": name} for name in ("us-east", "eu-west", "ap-south")]
    experiment = experiment_of(
        tmp_path,
        regions=regions,
        overlay={"kind": "tsengine"},
        strategy={"kind": "bsp"},
        averager={"region": "us-east"},
    )
    real = train(experiment, tmp_path)
    assert len(final_digests(real.events)) == 1
    direct = [e for e in real.of("wan") if {e["src"], e["dst"]} == {"eu-west", "ap-south"}]
    assert direct, "regions without the averager talk to each other"


@pytest.mark.slow
def test_asgd_stops_at_its_target_in_all_regions(tmp_path: Path) -> None:
    target = {"metric": "accuracy", "value": 0.0, "direction": "at_least"}
    steps = 5000
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "asgd"},
        train={"steps": steps, "eval_every": 4, "target": target},
        emulate={"step_s": 0.05},
    )
    done = train(experiment, tmp_path)
    assert done.summary.time_to_target_s is not None
    assert [e["cause"] for e in done.of("stop_requested")] == ["accuracy reached 0"]
    newest = {e["region"]: e["step"] for e in done.of("step")}
    assert set(newest) == {"us-east", "eu-west"}
    assert all(4 <= step < steps for step in newest.values())
    assert done.of("eval")[-1].fields["final"] is True


def metric_lines() -> list[str]:
    """What all nodes of the connected cluster tell Prometheus about the run."""
    lines = []
    for node in ray_internals.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines += [line for line in answer.read().decode().splitlines() if '"tiny"' in line]
    return lines


@pytest.mark.slow
def test_asgd_ga_in_async_mode_serves_metrics_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's metrics port shows every region; a stop in mid-flight saves balanced books."""
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "250")
    wanted = [
        f'{name}{{.*region="{region}",run="tiny"'
        for region in ("us-east", "eu-west")
        for name in ("ray_geo_ray_step_index", "ray_geo_ray_samples_count_total")
    ]
    wanted.append('ray_geo_ray_wan_bytes_total{.*peer="us-east".*traffic_class="update"')
    seen: list[str] = []

    def look(event: Event) -> None:  # fed in the thread that the run is watched in
        nonlocal seen
        if event.kind == "eval" and event["region"] is None and not seen:
            lines = metric_lines()
            if all(any(re.search(pattern, line) for line in lines) for pattern in wanted):
                seen = lines
                requests.request_stop(run.path)

    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "asgd_ga", "interval": 3, "wait": "when_busy"},
        optimizer={"kind": "sgd", "lr": 0.1},
        train={"steps": 100_000, "eval_every": 5, "mode": "async"},
        regions=[{"name": "us-east", "workers": 2}, {"name": "eu-west"}],
        emulate={"step_s": 0.03},
    )
    run = directory.create(experiment, tmp_path)
    with pytest.raises(InterruptedRunError, match="its state is saved"):
        train(experiment, tmp_path, begun=run, sink=look)
    assert seen
    books = books_of(run)
    events = events_of(run.path)
    (saved,) = [event for event in events if event.kind == "checkpoint"]
    assert saved["step"] == max(e["step"] for e in events if e.kind == "step")
    evals = Counter(event["region"] for event in events if event.kind == "eval")
    assert evals[None] == min(evals["us-east"], evals["eu-west"]) > 0  # each with its like
    for region, book in books.items():
        applied = sum(e["samples"] for e in events if e.kind == "step" and e["region"] == region)
        assert book.applied == applied > 0
        assert book.cursor - book.applied <= 2 * BATCH  # what two workers had in hand


def test_one_region_alone_is_plain_training(tmp_path: Path) -> None:
    """An interrupt that comes after the last step changes nothing: the run is whole."""

    stop = Interruption()

    def interrupt_too_late(event: Event) -> None:
        if event.kind == "step" and event["step"] == 8:
            stop.set()

    experiment = experiment_of(
        tmp_path,
        regions=[{"name": "ap-south", "workers": 2}],
        checkpoint={"every_s": 0.3},
        emulate={"step_s": 0.1},
    )
    real = train(experiment, tmp_path, sink=interrupt_too_late, interruption=stop)
    assert real.summary.digest == simulate(experiment, tmp_path).summary.digest
    assert real.summary.wan_bytes == {}
    assert not real.of("exchange")
    assert real.of("checkpoint")
    books_of(real.run)
