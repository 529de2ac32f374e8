"""The connection between a region's server and its bridge breaks; both live, and dial again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_bridges_in_process import FAR, HOME, SECTIONS, WHERE, kill_at
from test_bridges_in_process import config as config_of
from test_overlay_rounds import experiment as overlay_of
from test_overlay_rounds import params_of

from geo_ray.experiment.experiment import Experiment
from geo_ray.transport.wire import sockets
from tests.support.region_support import InProcess, experiment_of

DGT = {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}
TRAIN = {"steps": 12, "eval_every": 0}
STAYS: dict[str, dict[str, Any]] = {  # what a bridge keeps that is not replaced
    "turns": {"strategy": {"kind": "asgd"}, "transfers": {"small_bytes": 0}},
    "dgt": {
        "strategy": {"kind": "asgd"},
        "codec": {"up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}},
    },
}


class Cutter:
    """Cuts the far region's connection to its bridge, as a router that forgets it would."""

    def __init__(self, region: str = FAR) -> None:
        self.world: InProcess | None = None
        self.region = region
        self.times = 0

    def strike(self) -> None:
        self.times += 1
        for sock in list(self.site.bridge_lan._sockets):
            sockets.hang_up(sock)

    @property
    def site(self) -> Any:
        assert self.world is not None
        return self.world.sites[self.region]


def run_cut(config: Experiment, cutter: Cutter, directory: Path) -> list[str]:
    with InProcess(config, directory) as world:
        cutter.world = world
        bridges = [site.bridge for site in world.sites.values()]
        digests = world.run()
        world.check_books()
        assert [site.bridge for site in world.sites.values()] == bridges  # none was replaced
        assert all(
            site.primary.status().get("bridge_away_s") is None for site in world.sites.values()
        )
        ends = [torch.cat([s.params_S for s in site.shards]) for site in world.sites.values()]
        for end in ends[1:]:
            torch.testing.assert_close(ends[0], end, rtol=1e-4, atol=1e-5)
    return digests


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["vectors", "coded", "model_buffers"])
def test_a_round_comes_out_as_if_nothing_had_happened(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "codec" in SECTIONS[name] and where == WHERE[2]:
        where = WHERE[1]  # coded answers are not fetched
    with InProcess(config_of(name), tmp_path / "quiet") as world:
        expected = world.run()
    cutter = Cutter()
    kill_at(where, cutter, monkeypatch, most=2)  # type: ignore[arg-type]
    assert run_cut(config_of(name), cutter, tmp_path / "cut") == expected
    assert cutter.times == 2


@pytest.mark.parametrize("where", WHERE[:2])
@pytest.mark.parametrize("name", sorted(STAYS))
def test_bridges_that_are_never_replaced_are_dialled_again_too(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cutter = Cutter()
    kill_at(where, cutter, monkeypatch, most=2)  # type: ignore[arg-type]
    config = experiment_of(regions=[{"name": HOME}, {"name": FAR}], train=TRAIN, **STAYS[name])
    run_cut(config, cutter, tmp_path)
    assert cutter.times == 2


def test_the_averagers_own_region_dials_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with InProcess(config_of("vectors"), tmp_path / "quiet") as world:
        expected = world.run()
    cutter = Cutter(HOME)
    kill_at(WHERE[0], cutter, monkeypatch, most=2)  # type: ignore[arg-type]
    assert run_cut(config_of("vectors"), cutter, tmp_path / "cut") == expected
    assert cutter.times == 2


def test_sums_on_their_way_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = overlay_of({"kind": "ring"})
    with InProcess(config, tmp_path / "quiet") as world:
        world.run()
        expected_P = params_of(world, config.regions[0].name)
    cutter = Cutter(config.regions[1].name)
    kill_at(WHERE[0], cutter, monkeypatch, most=2)  # type: ignore[arg-type]
    run_cut(config, cutter, tmp_path / "cut")
    assert cutter.times == 2
    assert cutter.world is not None
    # Parts are added as they come, so the last bits may differ; a part that counts twice is seen.
    found_P = params_of(cutter.world, config.regions[0].name)
    torch.testing.assert_close(found_P, expected_P, rtol=1e-5, atol=1e-6)
