"""What `dgt.py` trains, and the same training on the simulator's clock."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import World
from geo_ray.telemetry.events import conform

HERE = Path(__file__).resolve().parent
SERVER, CLIENTS = "server", ("east", "west")
RATE_MBPS = 8.0  # the server's line, each way; its clients share it evenly
DELAY_S = 0.01
STEP_S = {"vgg": 0.03, "alexnet": 0.03, "googlenet": 0.06}  # convolutions compute more
EVERY = 5  # steps between evaluations
TARGET = 0.9

SHARE = {"vgg": 0.1, "alexnet": 0.1, "googlenet": 0.2}
CODEC: dict[str, Any] = {
    "kind": "dgt",
    "block_bytes": 256,  # small networks need small blocks, or there is little to choose from
    "late": "merge",
    "late_scaled": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "reliable": {"loose": "reliable"},
    "dgt": {},
    "random": {"order": "random"},
    "drop": {"loose": "drop"},
    "put_back": {"late": "put_back", "late_scaled": False},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Attributes:
        shape: of the network.
        loss: share of packets that the links lose.
        variant: name in `VARIANTS`.
        seed: of everything.
    """

    shape: str
    loss: float
    variant: str
    seed: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a training on the virtual clock.

    Attributes:
        step_s: mean time of a step.
        reached: steps until the accuracy crossed the target; infinite if it never did.
        accuracy: mean of the last fifth of the evaluations.
    """

    step_s: float
    reached: float
    accuracy: float

    @property
    def reached_s(self) -> float:
        """Seconds until the target."""
        return self.reached * self.step_s


def experiment_of(case: Case, steps: int, *, evaluate: bool, emulated: bool) -> dict[str, Any]:
    """The configuration of a training.

    Args:
        case: which.
        steps: how many.
        evaluate: also in between.
        emulated: every client's link is emulated as its even part of the server's line.
    """
    rate_mbps = RATE_MBPS / len(CLIENTS)
    link = {"link": {"rate_mbps": rate_mbps, "delay_s": DELAY_S, "loss": case.loss}}
    codec = CODEC | {"reliable_fraction": SHARE[case.shape]} | VARIANTS[case.variant]
    return {
        "name": "dgt",
        "seed": case.seed,
        "task": {"use": f"{HERE / 'dgt_task.py'}:Shapes", "options": {"shape": case.shape}},
        "data": {"generate": {}, "batch_size": 32},
        "regions": [{"name": region} for region in (SERVER, *CLIENTS)],
        "strategy": {"kind": "bsp"},
        "codec": {"up": codec},
        "optimizer": {"kind": "adamw", "lr": 0.003},
        "train": {"steps": steps, "eval_every": EVERY * evaluate, "step_timeout_s": 60},
        "emulate": {"step_s": STEP_S[case.shape]} | (link if emulated else {}),
        "cluster": {"kind": "existing"},
        "checkpoint": {"every_s": None},
    }


def manifest_of(tree: dict[str, Any], directory: Path) -> str:
    """The data of a training, written to a directory that is made."""
    experiment = Experiment.model_validate_json(json.dumps(tree))
    directory.mkdir()
    return prepare_manifest(experiment, load_task(experiment.task, HERE), HERE, directory)[1]


def simulate(case: Case, steps: int, directory: Path) -> Simulated:
    """Train with real gradients; time, links and what gets lost are the simulator's."""
    torch.set_num_threads(1)
    tree = experiment_of(case, steps, evaluate=True, emulated=True)
    experiment = Experiment.model_validate_json(json.dumps(tree))
    task = load_task(experiment.task, HERE)
    folder = directory / "-".join(map(str, (case.shape, case.loss, case.variant, case.seed)))
    folder.mkdir()
    manifest, _ = prepare_manifest(experiment, task, HERE, folder)
    curve: list[tuple[int, float]] = []

    def emit(kind: str, t_s: float, **fields: Any) -> Any:
        if kind == "eval" and fields["region"] is None:
            curve.append((fields["step"], fields["metrics"]["accuracy"]))
        return conform(kind, t_s, fields)

    result = World(experiment, task, manifest, emit).run()
    last = [accuracy for _, accuracy in curve[-max(1, len(curve) // 5) :]]
    return Simulated(result.seconds / steps, reached(curve), statistics.mean(last))


def reached(curve: Sequence[tuple[float, float]]) -> float:
    """When the accuracy, as a mean of five evaluations, crossed the target; interpolated."""
    smooth = [
        (curve[i + 2][0], statistics.mean(accuracy for _, accuracy in curve[i : i + 5]))
        for i in range(len(curve) - 4)
    ]
    for (x0, y0), (x1, y1) in itertools.pairwise(smooth):
        if y0 < TARGET <= y1:
            return x0 + (x1 - x0) * (TARGET - y0) / (y1 - y0)
    return math.inf
