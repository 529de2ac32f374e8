"""Checkpoints in the simulator: they change nothing, and a resume goes on from where it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.world import SimCheckpoint
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.assignment import Ledger
from tests.support.world_support import Run, experiment, of_kind

KINDS = sorted(STRATEGIES)
STEPS = 14
UNEVEN = {
    "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 4},
    "regions": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
    "train": {"steps": STEPS, "eval_every": 0},
    "emulate": {
        "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.8},
        "link": {"rate_mbps": 20, "delay_s": 0.04},
    },
}
"""Three regions, of which the fastest is eight times as fast as the slowest."""


def sections_of(kind: str) -> dict[str, Any]:
    found = of_kind(kind) | UNEVEN
    if kind == "fedavg":
        found["strategy"] = found["strategy"] | {"fraction": 0.4}
    return found


def decisions(run: Run) -> list[tuple[Any, ...]]:
    """Which update of whom was answered in which round, and when: what an averager decides."""
    return [
        (e["region"], e["seq"], e["round"], e["staleness"], e["bytes_sent"])
        for e in run.of("exchange")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_change_neither_decisions_nor_models_nor_time(data_dir, kind: str) -> None:
    often = experiment(**sections_of(kind), checkpoint={"every_s": 0.05})
    never = experiment(**sections_of(kind), checkpoint={"every_s": None})
    saved, whole = Run(often, data_dir).go(), Run(never, data_dir).go()
    waits = any(often.state_every(region) for region in often.regions)  # for reports of workers
    assert len(saved.of("checkpoint")) > (8 if waits else 20) and not whole.of("checkpoint")
    assert decisions(saved) == decisions(whole)
    assert saved.digests() == whole.digests()
    assert saved.result.rounds == whole.result.rounds
    assert saved.result.seconds == pytest.approx(whole.result.seconds, rel=0.02)


def cuts(
    config: Experiment, data_dir: Path, moments_s: Sequence[float], like: Run | None = None
) -> list[SimCheckpoint]:
    """The checkpoints that begin then and become whole, of runs that end ``like`` another.

    One run makes several; those that came too early after another are made by the next run.
    """
    found: dict[int, SimCheckpoint] = {}
    waiting = dict(enumerate(moments_s))
    while waiting:
        run = Run(config, data_dir)
        for number, when_s in waiting.items():
            run.world.checkpoint_at(when_s, number)
        run.go()
        assert like is None or run.digests() == like.digests()
        whole = {n: cut for n, cut in run.world.checkpoints.items() if cut.is_whole}
        if not whole:
            break
        found |= whole
        waiting = {n: when_s for n, when_s in waiting.items() if n not in whole}
    return [found[number] for number in sorted(found)]


def rows_applied(run: Run) -> dict[str, int]:
    return {name: region.server.ledger.applied for name, region in run.world.regions.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_one_that_the_run_could_have_been(data_dir, kind: str, seed: int) -> None:
    """Parts of different moments fit together: nothing is lost, nothing counts twice."""
    config = experiment(**sections_of(kind), checkpoint={"every_s": None})
    whole = Run(config, data_dir).go()
    when_s = Random(f"{kind}/{seed}").uniform(0.05, 0.9) * whole.result.seconds
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(when_s, 1)
    assert killed.go().digests() == whole.digests()
    cut = killed.world.checkpoints[1]
    before = {
        name: Ledger.restore(parts[0].control["ledger"]) for name, parts in cut.regions.items()
    }
    resumed = Run(config, data_dir)
    resumed.world.restore(cut)
    for name, (_, shards) in cut.regions.items():  # what it begins with is what the run had
        params_P = torch.cat([tensors["params"] for tensors, _ in shards])
        assert torch.equal(resumed.world.regions[name].params_P, params_P)
    resumed.go()
    ends = list(resumed.result.params_P.values())
    exact = STRATEGIES[kind]().traits.in_rounds or STRATEGIES[kind]().traits.sends == "model"
    for other_P in ends[1:]:
        tolerance = 0.0 if exact else 1e-4
        assert torch.allclose(ends[0], other_P, rtol=0, atol=tolerance)
    together = config.counts_total_rows
    for name, region in resumed.world.regions.items():
        ledger = region.server.ledger
        ledger.check()
        assert ledger.applied >= before[name].applied
        if not together:
            assert ledger.applied == whole.world.regions[name].server.ledger.applied
    if together:
        assert resumed.world.averager.samples >= config.rows
    blocking = STRATEGIES[kind]().traits.exchange.blocking == "always"
    if STRATEGIES[kind]().traits.in_rounds and blocking and not together:
        assert resumed.digests() == whole.digests()


def test_an_answer_that_is_on_its_way_at_the_cut_arrives_after_the_resume(data_dir) -> None:
    """The averager has answered, the region has not heard: the old answer comes again."""
    sections = sections_of("asgd") | {"strategy": {"kind": "asgd", "wait": "always"}}
    sections["emulate"] = {"step_s": 0.1, "link": {"rate_mbps": 0.005, "delay_s": 0.01}}
    config = experiment(**sections, checkpoint={"every_s": None})
    whole = Run(config, data_dir).go()
    found = []
    for cut in cuts(config, data_dir, [halves / 2 for halves in range(1, 16)]):
        answered = {row["to"] for row in cut.averager.control["exchanges"]["answers"]}
        waits = {n for n, (primary, _) in cut.regions.items() if primary.control["open"]}
        found += [cut] if answered & waits & {"b", "c"} else []
    cut = found[0]
    resumed = Run(config, data_dir)
    resumed.world.restore(cut)
    resumed.go()
    assert rows_applied(resumed) == rows_applied(whole)
    for one_P, other_P in zip(
        resumed.result.params_P.values(), resumed.result.params_P.values(), strict=True
    ):
        assert torch.allclose(one_P, other_P, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["decoupled", "asgd", "async_local_sgd"])
def test_an_update_that_is_answered_twice_after_a_resume_counts_once(data_dir, kind: str) -> None:
    """Finals wait at the cut, an open request releases them, and then they are said again."""
    sections = sections_of(kind)
    sections["emulate"] = UNEVEN["emulate"] | {"link": {"rate_mbps": 0.5, "delay_s": 0.2}}
    config = experiment(**sections, checkpoint={"every_s": None})
    whole = Run(config, data_dir).go()
    finals = 0
    moments = [(0.5 + part / 32) * whole.result.seconds for part in range(16)]
    for cut in cuts(config, data_dir, moments):
        finals += bool(cut.averager.control["exchanges"]["finals"])
        resumed = Run(config, data_dir)
        resumed.world.restore(cut)
        resumed.go()
        assert rows_applied(resumed) == rows_applied(whole)
        ends = list(resumed.result.params_P.values())
        for other_P in ends[1:]:
            assert torch.allclose(ends[0], other_P, rtol=0, atol=1e-4)
    assert finals, "no cut held a final update"


@pytest.mark.parametrize("overlay", ["binary", "ring", "tsengine"])
def test_over_an_overlay_regions_hear_of_a_checkpoint_by_their_answers(data_dir, overlay) -> None:
    sections = sections_of("bsp") | {"overlay": {"kind": overlay}}
    often, never = (experiment(**sections, checkpoint={"every_s": s}) for s in (0.5, None))
    saved, whole = Run(often, data_dir).go(), Run(never, data_dir).go()
    assert saved.of("checkpoint") and saved.digests() == whole.digests()
    assert saved.result.seconds == pytest.approx(whole.result.seconds, rel=0.02)
    killed = Run(never, data_dir)
    killed.world.checkpoint_at(2.5, 1)
    killed.go()
    resumed = Run(never, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == whole.digests()


MEETINGS = {
    "lossy blocks": {"codec": {"up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}}},
    "lossy blocks with grace": {
        "codec": {
            "up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4, "grace_s": 0.2}
        }
    },
    "turns": {"transfers": {"order": "shortest_first", "small_bytes": 0, "averager_mbps": 0.4}},
    "turns that give updates up": {
        "transfers": {"small_bytes": 0, "averager_mbps": 0.4, "max_staleness": 3}
    },
    "shards": {"regions": [{"name": "a", "ps_shards": 2}, {"name": "b", "ps_shards": 3}]},
    "codecs": {
        "codec": {"up": {"kind": "topk", "ratio": 0.2}, "down": {"kind": "topk", "ratio": 0.3}}
    },
}
"""What meets checkpoints. Ends are equal only if every change counts once, in every region."""


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga"])
@pytest.mark.parametrize("meeting", MEETINGS)
def test_every_change_counts_once_after_a_resume(data_dir, kind: str, meeting: str) -> None:
    emulate = {"link": {"rate_mbps": 0.4, "delay_s": 0.03, "loss": 0.2}, "step_s": 0.5}
    sections = {
        "strategy": {"kind": kind} | ({"interval": 2} if kind == "asgd_ga" else {}),
        "train": {"steps": 12, "eval_every": 0},
        "emulate": emulate,
        "checkpoint": {"every_s": None},
    }
    config = experiment(**sections | MEETINGS[meeting])
    whole = Run(config, data_dir).go()
    parts = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.98)
    moments = [part * whole.result.seconds for part in parts]
    for part, cut in zip(parts, cuts(config, data_dir, moments, like=whole), strict=True):
        resumed = Run(config, data_dir)
        resumed.world.restore(cut)
        resumed.go()
        assert rows_applied(resumed) == rows_applied(whole)
        a_P, b_P = resumed.result.params_P.values()
        assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5), f"cut at {part} of the run"
