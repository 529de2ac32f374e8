"""Overlays on the virtual clock: rounds take what their schedule takes, computed here by itself.

Every pair of regions has a link of its own each way. A part of a vector takes ``SEND_S`` to be put
on it and ``DELAY_S`` to arrive; control messages take the delay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.network_models.overlay_model import Lines, OverlayModel
from geo_ray.simulator.network import FRAME_BYTES
from geo_ray.transport.overlay.build import build_coordinator, build_policy, grid_of, links_of
from tests.support.world_support import Run, experiment

DELAY_S = 0.01
NUM_PARAMS = 556  # of digits with width 2
NAMES = ("ap", "eu", "me", "sa", "us")  # sorted; numbered so in the overlay
HOME = "eu"
SEGMENT = 139  # four segments, all whole
RATE_MBPS = 0.1
STEP_S = 0.5
SEND_S = (4 * SEGMENT + FRAME_BYTES) * 8e-6 / RATE_MBPS


def sections(overlay: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    emulate = {"link": {"rate_mbps": RATE_MBPS, "delay_s": DELAY_S}, "step_s": STEP_S}
    return {
        "regions": [{"name": name} for name in NAMES],
        "averager": {"region": HOME},
        "strategy": {"kind": "sma", "interval": 2},
        "train": {"steps": 4, "eval_every": 0},
        "emulate": emulate,
        "overlay": {"transfer": {"segment_bytes": 4 * SEGMENT}} | dict(overlay),
    } | more


def spans_s(run: Run, number: int = 0) -> dict[str, tuple[float, float]]:
    """When each region was ready for one of its rounds, and when it had the answer."""
    exchanges = {
        event["region"]: event for n in NAMES for event in run.of("exchange", n)[number:][:1]
    }
    return {name: (event["start_s"], event.t_s) for name, event in exchanges.items()}


def round_s(run: Run) -> float:
    """What the first round took."""
    spans = spans_s(run).values()
    return max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)


# ------------------------------------------------------------------ trees, by hand


def tree_s(
    parents: Mapping[str, str], ready_s: Mapping[str, float], segments: int = 4
) -> dict[str, float]:
    """When each region has the result, over a tree in which ``parents`` leads to HOME."""
    children = {name: [c for c, p in parents.items() if p == name] for name in NAMES}

    def over_link(there_s: list[float]) -> list[float]:
        """Segments that are ready one after the other, over a link of their own."""
        arrivals, free_s = [], 0.0
        for each in there_s:
            free_s = max(free_s, each) + SEND_S
            arrivals.append(free_s + DELAY_S)
        return arrivals

    def summed(name: str) -> list[float]:
        found = [ready_s[name]] * segments
        for child in children[name]:
            found = [max(pair) for pair in zip(found, over_link(summed(child)), strict=True)]
        return found

    words_s = [ready_s[name] + (name != HOME) * DELAY_S for name in NAMES]
    commit_s = max([*summed(HOME), *words_s])
    ends = {HOME: commit_s}

    def hand_on(name: str, have_s: list[float]) -> None:
        for child in children[name]:
            told_s = commit_s + (0.0 if name == HOME else DELAY_S)  # the order to do so
            got = over_link([max(told_s, each) for each in have_s])
            ends[child] = got[-1]
            hand_on(child, got)

    hand_on(HOME, [commit_s] * segments)
    return ends


BINARY = {"ap": HOME, "me": HOME, "sa": "ap", "us": "ap"}
GROUPS = [["eu", "ap"], ["us", "me", "sa"]]
RACK = {"ap": HOME, "us": HOME, "me": "us", "sa": "us"}


@pytest.mark.parametrize(
    ("overlay", "parents"),
    [({"kind": "binary"}, BINARY), ({"kind": "rack", "groups": GROUPS}, RACK)],
    ids=["binary", "rack"],
)
def test_a_tree_takes_as_long_as_its_pipeline(
    simulated: Callable[..., Run], overlay: dict[str, Any], parents: dict[str, str]
) -> None:
    run = simulated(**sections(overlay))
    assert run.num_params == NUM_PARAMS
    for number in (0, 1):
        spans = spans_s(run, number)
        ready_s = {name: start_s for name, (start_s, _) in spans.items()}
        assert (len(set(ready_s.values())) > 1) == (number > 0), "later rounds begin one by one"
        wanted_s = tree_s(parents, ready_s)
        assert {name: end_s for name, (_, end_s) in spans.items()} == pytest.approx(wanted_s)


def test_whole_messages_take_every_level_in_full(simulated: Callable[..., Run]) -> None:
    run = simulated(**sections({"kind": "binary", "transfer": {"segment_bytes": 4 * NUM_PARAMS}}))
    level_s = (4 * NUM_PARAMS + FRAME_BYTES) * 8e-6 / RATE_MBPS + DELAY_S
    assert round_s(run) == pytest.approx(4 * level_s, rel=1e-9)  # two levels up, two down


# ------------------------------------------------------------------ a ring, by hand


def test_a_ring_takes_two_times_around_less_two_hops(simulated: Callable[..., Run]) -> None:
    """Four regions, a slice each: every hop is a segment and a delay, all links at once."""
    names = NAMES[:4]
    more = {"regions": [{"name": name} for name in names]}
    run = simulated(**sections({"kind": "ring"}, **more))
    hop_s = SEND_S + DELAY_S
    whole_s = 2 * 3 * hop_s
    for name in names:
        event = run.of("exchange", name)[0]
        took_s = event.t_s - event["start_s"]
        # All are whole at the same time; the others hear from the averager's region that it counts.
        assert took_s == pytest.approx(whole_s + (0.0 if name == HOME else DELAY_S), rel=1e-9)


# ------------------------------------------------------------------ against the model of lines


@pytest.mark.parametrize(
    "overlay",
    [
        {"kind": "binary"},
        {"kind": "rack"},
        {"kind": "ring"},
        {"kind": "tsengine", "epsilon": 0.0, "probes": 0},
        {"kind": "netstorm", "probes": 0},
    ],
    ids=lambda section: section["kind"],
)
def test_it_is_as_fast_as_the_other_model_of_the_same_links(
    simulated: Callable[..., Run], overlay: dict[str, Any]
) -> None:
    """That one computes lines by fair shares, sends one part at a time, and has its own clock."""
    run = simulated(**sections(overlay, train={"steps": 2, "eval_every": 0}))
    config, leader = run.config.overlay, NAMES.index(HOME)
    grid, links = grid_of(config, NUM_PARAMS), links_of(config, len(NAMES))
    policy = build_policy(config, NAMES, leader, grid, links, run.config.seed)
    lines = Lines.capped(len(NAMES), 1e9, DELAY_S)
    lines.pair_NN[:] = RATE_MBPS
    model = OverlayModel(
        lines,
        build_coordinator(leader, policy, links, grid, run.config.seed),
        grid,
        4 * SEGMENT + FRAME_BYTES,
    )
    vectors = [torch.zeros(NUM_PARAMS).numpy() for _ in NAMES]
    model.run_round(1, vectors, compute_s=1.0)
    assert round_s(run) == pytest.approx(model.times_s[0], rel=1e-6)


# ------------------------------------------------------------------ what it comes to


KINDS = ("binary", "rack", "ring", "tsengine", "netstorm")


@pytest.mark.parametrize("kind", KINDS)
def test_training_comes_to_the_same_as_over_a_star(
    simulated: Callable[..., Run], kind: str
) -> None:
    star = simulated(**sections({}) | {"overlay": {"kind": "star"}})
    run = simulated(**sections({"kind": kind}))
    assert len(set(run.digests().values())) == 1, "all regions end with the same bits"
    for name in NAMES:
        theirs_P = star.result.params_P[name]
        torch.testing.assert_close(run.result.params_P[name], theirs_P, rtol=1e-4, atol=1e-5)
    assert run.result.rounds == star.result.rounds


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_twice_is_the_same(simulated: Callable[..., Run], kind: str) -> None:
    runs = [simulated(**sections({"kind": kind})) for _ in range(2)]
    assert runs[0].events == runs[1].events and runs[0].digests() == runs[1].digests()


def test_traffic_per_link_matches_the_overlay(simulated: Callable[..., Run]) -> None:
    run = simulated(**sections({"kind": "binary"}))
    pairs = {pair for pair, classes in run.result.sent_bytes.items() if sum(classes.values())}
    edges = set(BINARY.items())
    assert pairs == edges | {(b, a) for a, b in edges}
    rounds = 2
    size_bytes = rounds * 4 * (4 * SEGMENT + FRAME_BYTES)
    assert run.result.sent_bytes["sa", "ap"] == {"update": size_bytes}
    assert run.result.sent_bytes["ap", "sa"] == {"reply": size_bytes}


def test_a_run_ends_with_its_last_round_without_link_probes(
    simulated: Callable[..., Run],
) -> None:
    quiet, curious = (
        simulated(**sections({"kind": "tsengine", "epsilon": 0.0, "probes": probes}))
        for probes in (0, 3)
    )
    last_s = max(event.t_s for event in curious.of("exchange"))
    assert curious.result.seconds == pytest.approx(last_s, abs=0.01)
    sent = [sum(sum(c.values()) for c in r.result.sent_bytes.values()) for r in (quiet, curious)]
    assert sent[1] > sent[0], "links are measured between rounds"


def test_a_link_that_carries_nothing_for_a_while_is_gone_round(
    simulated: Callable[..., Run],
) -> None:
    """From 1 s on nothing passes between ap and us for ten minutes."""

    def went(stall_s: float) -> Run:
        overlay = {
            "kind": "binary",
            "transfer": {"segment_bytes": 4 * SEGMENT, "stall_s": stall_s},
        }
        cut = {"rate_mbps": RATE_MBPS, "delay_s": DELAY_S, "outages": [[1.0, 600.0]]}
        links = [{"src": a, "dst": b} | cut for a, b in (("ap", "us"), ("us", "ap"))]
        base = sections(overlay)
        return simulated(**base | {"emulate": base["emulate"] | {"links": links}})

    hasty, patient = went(2.0), went(1e4)
    assert hasty.result.seconds < 20.0 < 600.0 <= patient.result.seconds
    assert hasty.world._overlay._coordinator.restarts >= 1
    for run in (hasty, patient):
        assert len(set(run.digests().values())) == 1


def test_other_strategies_whose_rounds_are_means_take_part(simulated: Callable[..., Run]) -> None:
    for strategy in (
        {"kind": "bsp"},
        {"kind": "diloco", "interval": 2},
        {"kind": "hfa", "k1": 1, "k2": 2},
    ):
        star = simulated(**sections({}, strategy=strategy) | {"overlay": {"kind": "star"}})
        run = simulated(**sections({"kind": "tsengine"}, strategy=strategy))
        theirs_P = star.result.params_P[HOME]
        torch.testing.assert_close(run.result.params_P[HOME], theirs_P, rtol=1e-4, atol=1e-5)


def test_a_stop_reaches_all_regions_in_one_round(
    simulated: Callable[..., Run],
) -> None:
    target = {"metric": "loss", "value": 100.0, "direction": "at_most"}
    run = simulated(
        **sections({"kind": "ring"}, train={"steps": 40, "eval_every": 2, "target": target})
    )
    assert len(run.of("stop_requested")) == 1
    assert {len(run.of("step", name)) for name in NAMES} == {len(run.of("step", HOME))}
    assert len(run.of("step", HOME)) < 40


@pytest.mark.parametrize("kind", ["binary", "ring"])
def test_a_checkpoint_is_complete_and_a_run_resumes_from_it(data_dir: Path, kind: str) -> None:
    config = experiment(**sections({"kind": kind}, train={"steps": 8, "eval_every": 0}))
    run = Run(config, data_dir)
    run.world.checkpoint_at(1.5, 1)
    run.go()
    again = Run(config, data_dir)
    again.world.restore(run.world.checkpoints[1])
    again.go()
    assert again.result.seconds < run.result.seconds
    assert len(set(again.digests().values())) == 1
    theirs_P = run.result.params_P[HOME]
    torch.testing.assert_close(again.result.params_P[HOME], theirs_P, rtol=1e-5, atol=1e-6)
