"""Gradient noise over real sockets is what the simulator finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.simulator.world import World
from geo_ray.training import noise
from tests.support.region_support import InProcess, experiment_of

NAMES = ("us-east", "eu-west")
REGIONS = [{"name": NAMES[0], "workers": 2, "ps_shards": 2}, {"name": NAMES[1]}]
FIELDS = ("step", "grad_sq", "trace", "rows", "workers", "count")


@pytest.mark.parametrize(
    "how",
    [{}, {"averager": {"standby": NAMES[1], "region": NAMES[0]}}, {"overlay": {"kind": "ring"}}],
    ids=["star", "standby", "overlay"],
)
def test_regions_and_all_together(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 2)
    config = experiment_of(
        regions=REGIONS,
        strategy={"kind": "bsp"},
        train={"steps": 8, "eval_every": 0},
        emulate={"step_s": 0.01},
        **how,
    )
    with InProcess(config, tmp_path) as world:
        world.run()
        told = [event for site in world.sites.values() for event in site.event_buffer.take(100_000)]
        found: list[tuple[str, dict[str, Any]]] = []

        def note(kind: str, t_s: float, **fields: Any) -> Any:
            found.append((kind, fields))

        World(config, world.task, world.manifest, note).run()
    for name in (NAMES[0], None):
        real = [e for e in told if e["kind"] == "noise" and e["region"] == name]
        simulated = [
            fields for kind, fields in found if kind == "noise" and fields["region"] == name
        ]
        assert [e["step"] for e in real] == [2, 4, 6, 8]
        for one, other in zip(real, simulated, strict=True):
            values = [[float(event[field]) for field in FIELDS] for event in (one, other)]
            assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5)
