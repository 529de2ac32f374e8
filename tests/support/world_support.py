"""Small experiments on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from geo_ray.base.canonical import canonical_json, sha256_hex
from geo_ray.base.load import load_text
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import LAN_S, SimResult, World
from geo_ray.telemetry.events import Event, conform
from geo_ray.training.parameters import digest

BASE: dict[str, Any] = {
    "name": "tiny",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 4},
    "regions": [{"name": "a"}, {"name": "b"}],
    "strategy": {"kind": "sma", "interval": 2},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "train": {"steps": 4, "eval_every": 0},
    "emulate": {"link": {"rate_mbps": 10, "delay_s": 0.03}, "step_s": 0.5},
}

LEARNS: dict[str, dict[str, Any]] = {
    "ama": {},
    "fedavg": {"strategy": {"interval": 4}},
    "hfa": {"strategy": {"k1": 2, "k2": 2}},
    "nbsync": {"strategy": {"merge": "correct"}},
    "diloco": {"strategy": {"interval": 4, "outer": {"kind": "nesterov", "momentum": 0.3}}},
    "diloco_streaming": {"strategy": {"interval": 8, "tau": 1, "outer": {"kind": "sgd"}}},
    "muloco": {"strategy": {"interval": 4}, "optimizer": {"kind": "muon", "lr": 0.02}},
    "cocodc": {"strategy": {"interval": 8, "fragments": 2, "tau": 1, "outer": {"kind": "sgd"}}},
    "diloco_eager": {"strategy": {"interval": 8, "outer": {"kind": "sgd"}}},
    "one_step_delay": {
        "strategy": {"interval": 4, "merge": "correct", "outer": {"kind": "sgd"}},
    },
    "decoupled": {"strategy": {"interval": 8, "quorum": 2, "outer": {"kind": "sgd"}}},
    "fedasync": {"strategy": {"interval": 4}},
    "fedat": {"strategy": {"interval": 4}},
    "fedgsync": {"strategy": {"interval": 4}},
    "async_local_sgd": {"strategy": {"interval": 8, "outer": {"momentum": 0.3}}},
    "halos": {
        "strategy": {
            "local_steps": 2,
            "interval": 2,
            "local": {"lr": 1.0, "momentum": 0.0, "period": 1},
            "outer": {"lr": 0.7, "momentum": 0.0},
        }
    },
    "sparseloco": {"strategy": {"interval": 4}, "codec": {"up": {"kind": "chunked_topk"}}},
    "demo": {"optimizer": {"kind": "sgd", "lr": 0.003}},
}


def of_kind(kind: str, **sections: Any) -> dict[str, Any]:
    """Sections with which a strategy learns within a hundred steps, if given ones say no more."""
    settings = LEARNS.get(kind, {})
    strategy = {"kind": kind} | settings.get("strategy", {})
    return sections | settings | {"strategy": strategy}


def experiment(**sections: Any) -> Experiment:
    """The tiny experiment with whole sections replaced."""
    return load_text(canonical_json(BASE | sections), [], Experiment, "test")


class Run:
    """A finished simulation; a message within a region takes ``lan_s``."""

    def __init__(self, config: Experiment, data_dir: Path, lan_s: float = LAN_S) -> None:
        self.config = config
        self.events: list[Event] = []
        task = load_task(config.task, data_dir)
        # The data depend on nothing else here.
        folder = data_dir / sha256_hex("-".join(config.region_names).encode())[:16]
        folder.mkdir(exist_ok=True)
        manifest, _ = prepare_manifest(config, task, data_dir, folder)
        self.world = World(config, task, manifest, self._emit, lan_s)
        self.result: SimResult | None = None

    def _emit(self, kind: str, t_s: float, **fields: Any) -> Event:
        self.events.append(conform(kind, t_s, fields))
        return self.events[-1]

    def go(self) -> Run:
        self.result = self.world.run()
        return self

    def of(self, kind: str, region: str | None = None) -> list[Event]:
        """Events of one kind, of one region if it is named."""
        return [
            e for e in self.events if e.kind == kind and region in (None, e.fields.get("region"))
        ]

    def digests(self) -> dict[str, str]:
        return {name: digest(params_P) for name, params_P in self.result.params_P.items()}

    @property
    def num_params(self) -> int:
        return next(iter(self.result.params_P.values())).numel()


def check_ended(run: Run) -> None:
    """Check that regions end with one model, exactly where the strategy says so, and all books."""
    traits, ends = run.config.strategy.traits, list(run.result.params_P.values())
    exact = traits.in_rounds or traits.sends == "model"
    for other_P in ends:
        assert torch.isfinite(other_P).all()
        assert torch.allclose(ends[0], other_P, rtol=0, atol=0.0 if exact else 1e-4)
    for region in run.world.regions.values():
        region.server.ledger.check()
        assert not region.server.ahead
