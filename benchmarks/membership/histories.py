"""Random histories of a simulated run's members: one a seed, and what must be true of every one.

A history draws a strategy, regions, links, speeds and checkpoints, and lets regions join, leave, be
lost and come back at random times, the averager's too, and cuts links. In half of them what is lost
comes back by itself, as a run has it (`Backoff`), and in some of these a region flaps. Then the run
is resumed from its last checkpoint, if there is one, and goes on to its end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from geo_ray.base.canonical import canonical_json
from geo_ray.base.errors import RegionLostError
from geo_ray.base.load import load_text
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.resume import without_lost
from geo_ray.runtime.regions import Backoff
from geo_ray.simulator.world import SimCheckpoint, World
from geo_ray.strategies.registry import STRATEGIES

NAMES = ("a", "b", "c", "d", "e")
ASKS = 4
SHORT: dict[str, dict[str, Any]] = {  # rounds that fit a short run
    "diloco": {"interval": 4},
    "diloco_streaming": {"interval": 8, "tau": 1},
    "muloco": {"interval": 4},
    "cocodc": {"interval": 8, "fragments": 2, "tau": 1},
    "diloco_eager": {"interval": 4},
    "one_step_delay": {"interval": 4},
    "decoupled": {"interval": 8, "quorum": 2},
    "async_local_sgd": {"interval": 4},
    "halos": {"local_steps": 2, "interval": 2},
    "sparseloco": {"interval": 4},
    "hfa": {"k1": 2, "k2": 2},
}


def optimizer_of(kind: str, lr: float) -> dict[str, Any]:
    """The section of a strategy's inner optimizer; `lr` is that of plain SGD."""
    if kind == "muloco":
        return {"kind": "muon", "lr": lr / 10}
    return {"kind": "sgd", "lr": 0.003 if kind == "demo" else lr}


class ViolationError(Exception):
    """Something was not true that must be."""


@dataclass(slots=True)
class History:
    """What one seed draws, and what came of it.

    Attributes:
        seed: all else follows from it.
        directory: for data, which all histories share.
        counts: events by kind, of both stretches.
    """

    seed: int
    directory: Path
    counts: dict[str, int] = field(default_factory=dict)
    _backoffs: defaultdict[str, Backoff] | None = None
    _world: World | None = None

    def run(self) -> None:
        """Simulate it, and check it.

        Raises:
            ViolationError: something was not true that must be.
            Exception: whatever the simulator raises is a violation, too.
        """
        draw = Random(self.seed)
        config = self._config(draw)
        task, manifest = self._data(config)
        self._world = world = World(config, task, manifest, self._seen)
        self._disturb(world, config, draw)
        if draw.random() < 0.5:
            self._backoffs = defaultdict(Backoff)
            if draw.random() < 0.3:
                self._flap(world, config, draw)
        try:
            self._finish(world)
        except RegionLostError:  # the averager's, and then who was to take over
            self._seen("ended", 0.0)
        self._backoffs = None  # a resume begins without those that were away
        saved = [cut for cut in world.checkpoints.values() if cut.is_whole]
        if saved:
            self._resume(config, task, manifest, saved[-1])

    def _config(self, draw: Random) -> Experiment:
        kind = draw.choice(sorted(STRATEGIES))
        names = NAMES[: draw.randint(3, 5)]
        others = names[1:]
        absent = draw.sample(others, draw.randint(0, len(names) - 2))
        present = [name for name in others if name not in absent]
        codec = {"up": {"kind": "chunked_topk"}} if kind == "sparseloco" else {}
        sections = {
            "name": "history",
            "task": {"use": "benchmarks.membership.history_task:Points"},
            "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 4},
            "regions": [{"name": name} for name in names],
            "strategy": {"kind": kind, **SHORT.get(kind, {})},
            "codec": codec,
            "optimizer": optimizer_of(kind, 0.05),
            "train": {"steps": draw.randint(8, 24), "eval_every": draw.choice((0, 4))},
            "emulate": {
                "step_s_by_region": {name: draw.uniform(0.05, 0.6) for name in names},
                "link": {"rate_mbps": draw.choice((1, 20)), "delay_s": draw.uniform(0.001, 0.3)},
            },
            "members": {"min": 1, "absent": absent},
            "averager": {"standby": draw.choice(("auto", present[-1]))},
            "checkpoint": {"every_s": draw.choice((None, 0.2, 1.0))},
            "seed": self.seed,
        }
        return load_text(canonical_json(sections), [], Experiment, "history")

    def _data(self, config: Experiment) -> tuple[Task, Manifest]:
        folder = self.directory / str(len(config.regions))
        folder.mkdir(parents=True, exist_ok=True)
        task = load_task(config.task, self.directory)
        # The same rows for every seed: making them would take longer than all else.
        alike = config.model_copy(update={"seed": 0})
        manifest, _ = prepare_manifest(alike, task, self.directory, folder)
        return task, manifest

    def _disturb(self, world: World, config: Experiment, draw: Random) -> None:
        long_s = config.train.steps * 0.6
        for _ in range(draw.randint(1, 8)):
            when_s, name = draw.uniform(0.0, long_s), draw.choice(config.region_names)
            what = draw.choice(("join", "join", "drain", "lose", "lose home", "cut"))
            if what == "join":
                beside = draw.sample(config.region_names, draw.choice((0, 1, 2)))
                world.change_at(when_s, joins=sorted({name, *beside}))
            elif what == "drain":
                world.change_at(when_s, leaves=[name])
            elif what == "cut":
                other = draw.choice([each for each in config.region_names if each != name])
                world.cut_at(when_s, name, other, draw.uniform(0.1, 3.0))
            else:
                lost = None if what == "lose home" else name
                world.lose_at(when_s, lost, noticed_s=draw.choice((0.0, 0.1, 1.0)))

    def _flap(self, world: World, config: Experiment, draw: Random) -> None:
        """Lose a region again and again, as soon as it may be back."""
        name, when_s = draw.choice(config.region_names[1:]), draw.uniform(0.0, 3.0)
        for _ in range(draw.randint(3, 8)):
            world.lose_at(when_s, name, noticed_s=0.1)
            when_s += draw.uniform(0.3, 4.0)

    def _bring_back(self, region: str, now_s: float) -> None:
        """Ask for it when it is due, and, as a run does, until it is heard: others may join now."""
        if self._backoffs is None or self._world is None:
            return
        backoff = self._backoffs[region]
        due_s = now_s + backoff.lost(now_s)
        backoff.take(due_s)
        for again in range(ASKS):
            self._world.change_at(due_s + again * 0.5, joins=[region])

    def _resume(
        self, config: Experiment, task: Task, manifest: Manifest, cut: SimCheckpoint
    ) -> None:
        left, _ = without_lost(config, {f"{name}-ps0" for name in cut.regions})
        world = World(left, task, manifest, self._seen)
        world.restore(cut)
        self._finish(world)

    def _finish(self, world: World) -> None:
        result = world.run()
        view = world.averager.view
        self._hold(set(result.params_P) == set(view.members), "who is there is a member")
        self._hold(not view.joining, "nobody is on the way any more")
        ends = list(result.params_P.values())
        for end_P in ends:
            self._hold(bool(torch.isfinite(end_P).all()), "parameters are finite")
            gap = float((end_P - ends[0]).abs().max())
            self._hold(gap <= 1e-3, f"all regions end with one model, and not {gap:g} apart")
        for region in world.regions.values():
            region.server.work.ledger.check()

    def _seen(self, kind: str, t_s: float, **fields: Any) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind in {"region_lost", "join_failed"}:
            self._bring_back(str(fields["region"]), t_s)
        elif kind == "region_joined" and self._backoffs is not None:
            self._backoffs[str(fields["region"])].joined(t_s)

    def _hold(self, is_true: bool, what: str) -> None:
        if not is_true:
            raise ViolationError(f"seed {self.seed}: {what}")
