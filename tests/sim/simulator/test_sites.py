"""Sites: many of one kind, each with its own speed; and what strategies make of that."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import ConfigError
from tests.support.world_support import BASE, Run, experiment, of_kind

SPEEDS = {"w-0": 0.02, "w-1": 0.05, "w-2": 0.1, "w-3": 0.4}
UNEVEN = {
    "regions": [{"name": "w", "copies": 4}],
    "emulate": {"link": {"rate_mbps": 10, "delay_s": 0.01}, "step_s_by_region": SPEEDS},
    "train": {"steps": 40, "eval_every": 0},
}


def test_copies_are_sites_with_numbered_names():
    config = experiment(**UNEVEN)
    assert config.region_names == ("w-0", "w-1", "w-2", "w-3")
    assert config.labels == config.region_names
    many = experiment(regions=[{"name": "hub"}, {"name": "x", "copies": 12}])
    assert many.region_names[:3] == ("hub", "x-00", "x-01") and len(many.regions) == 13


def test_sites_of_one_region_share_its_label_and_have_no_wide_area_link_between_them():
    regions = [{"name": "a"}, {"name": "b", "at": "a"}, {"name": "c"}]
    config = experiment(regions=regions)
    assert config.labels == ("a", "c")
    assert ("a", "b") not in config.links() and ("a", "c") in config.links()


def test_a_name_that_comes_twice_through_copies_is_refused():
    with pytest.raises(ConfigError, match="more than once"):
        experiment(regions=[{"name": "w", "copies": 2}, {"name": "w-1"}])


def test_esync_lets_all_sites_arrive_together(simulated):
    run = simulated(**UNEVEN, strategy={"kind": "esync", "slowest_steps": 2})
    steps = {name: len(run.of("step", name)) for name in SPEEDS}
    assert steps["w-0"] > 10 * steps["w-3"] > 0
    starts = {}
    for event in run.of("exchange"):
        starts.setdefault(event["round"], []).append(event["start_s"])
    middle = sorted(starts)[2:-1]
    assert middle
    for number in middle:  # a step and a message is what they may differ by
        assert max(starts[number]) - min(starts[number]) < 0.1 + 0.05


def test_nbsync_never_stands_still_and_caps_the_fast(simulated):
    run = simulated(**UNEVEN, strategy={"kind": "nbsync", "max_local_steps": 100})
    waits = [e["wait_s"] for name in SPEEDS for e in run.of("step", name)[1:-1]]
    assert max(waits) < 0.02  # the way to the parameter server, no more
    capped = simulated(**UNEVEN, strategy={"kind": "nbsync", "max_local_steps": 3})
    per_round = len(capped.of("step", "w-0")) / len(capped.of("exchange", "w-0"))
    assert per_round <= 3.5


def test_async_local_sgd_gives_steps_by_speed(simulated):
    run = simulated(**UNEVEN, strategy={"kind": "async_local_sgd", "interval": 16})
    rounds = {name: run.of("exchange", name) for name in SPEEDS}
    steps = {name: 40 / len(rounds[name]) for name in SPEEDS}  # each region takes 40
    assert steps["w-0"] > 12 and steps["w-3"] < 3


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("fedasync", {"interval": 16}),
        ("fedavg", {"interval": 16}),
        ("fedgsync", {"interval": 16, "quorum": 1.0}),
        ("halos", {"interval": 16, "local_steps": 1}),
    ],
)
def test_local_steps_follow_speed_if_asked(simulated, kind, more):
    def per_round(**by_speed):
        run = simulated(**UNEVEN, strategy={"kind": kind, **more, **by_speed})
        return {n: len(run.of("step", n)) / len(run.of("exchange", n)) for n in SPEEDS}

    same, followed = per_round(), per_round(by_speed=True)
    assert followed["w-0"] > 12 and followed["w-3"] < 4
    assert same["w-3"] > 2 * followed["w-3"]


def test_fedat_lets_fast_tiers_go_on(simulated):
    run = simulated(**UNEVEN, strategy={"kind": "fedat", "interval": 2, "tiers": 2})
    rounds = {name: len(run.of("exchange", name)) for name in SPEEDS}
    assert rounds["w-0"] == rounds["w-1"] > 2 * rounds["w-2"]
    assert abs(rounds["w-2"] - rounds["w-3"]) <= 1


def test_fedat_counts_the_exchange_in_its_tiers(simulated):
    """b is behind a slow link; c and d are a little slower than a to compute."""
    slow = [{"src": s, "dst": d, "rate_mbps": 0.02} for s, d in (("a", "b"), ("b", "a"))]
    emulate = {
        "link": {"rate_mbps": 100, "delay_s": 0.03},
        "links": slow,
        "step_s_by_region": {"a": 0.1, "b": 0.1, "c": 0.15, "d": 0.15},
    }
    run = simulated(
        regions=[{"name": name} for name in "abcd"],
        emulate=emulate,
        strategy={"kind": "fedat", "interval": 2, "tiers": 2},
        train={"steps": 40, "eval_every": 0},
    )
    numbers = run.world.averager.state.numbers
    assert {name: numbers[f"tier/{name}"] for name in "abcd"} == {"a": 0, "c": 0, "d": 1, "b": 1}


def test_a_checkpoint_in_the_first_round_puts_nobody_slow_into_a_fast_tier(data_dir):
    """c and d have not spoken when it comes."""
    speeds = {"a": 0.1, "b": 0.1, "c": 0.8, "d": 0.8}
    run = Run(
        experiment(
            regions=[{"name": name} for name in "abcd"],
            emulate={"link": {"rate_mbps": 100, "delay_s": 0.03}, "step_s_by_region": speeds},
            strategy={"kind": "fedat", "interval": 2, "tiers": 2},
            train={"steps": 20, "eval_every": 0},
        ),
        data_dir,
    )
    run.world.checkpoint_at(0.1, 1)
    run.go()
    assert run.world.checkpoints[1].averager is not None
    numbers = run.world.averager.state.numbers
    assert {name: numbers[f"tier/{name}"] for name in "abcd"} == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_the_simulator_knows_the_sizes_of_data_sets(simulated):
    run = simulated(strategy={"kind": "fedavg", "interval": 2})
    rows = run.world.averager.state.data_rows
    assert set(rows) == {"a", "b"} and sum(rows.values()) == 1433


def test_fedgsync_does_not_wait_for_slow_sites_of_a_group(simulated):
    run = simulated(**UNEVEN, strategy={"kind": "fedgsync", "interval": 2})
    rounds = {name: len(run.of("exchange", name)) for name in SPEEDS}
    assert rounds["w-0"] > 3 * rounds["w-3"] > 0


def test_a_deadline_closes_a_round_without_the_slowest(simulated):
    strategy = {"kind": "fedgsync", "interval": 2, "quorum": 1.0}
    patient = simulated(**UNEVEN, strategy=strategy)
    hasty = simulated(**UNEVEN, strategy=strategy | {"deadline_s": 0.15})
    assert len(patient.of("exchange", "w-0")) <= len(patient.of("exchange", "w-3")) + 1
    assert len(hasty.of("exchange", "w-0")) > 2 * len(hasty.of("exchange", "w-3"))


@pytest.mark.parametrize("kind", ["asgd_ga", "ama", "fedasync", "async_local_sgd", "halos"])
def test_a_bound_keeps_regions_together(simulated, kind):
    def most_ahead(**options) -> int:
        sections = of_kind(kind, **UNEVEN)
        sections["strategy"] = sections["strategy"] | {"interval": 1} | options
        sections["train"] = UNEVEN["train"] | {"count": "total", "steps": 20}
        run = simulated(**sections)
        done, worst = dict.fromkeys(SPEEDS, 0), 0
        for event in run.of("exchange")[: -len(SPEEDS) * 2]:
            done[event["region"]] += 1
            worst = max(worst, done[event["region"]] - min(done.values()))
        return worst

    # An answer is on its way for a moment, in which the slowest may speak once more.
    assert most_ahead(staleness={"bound": 2}) <= 3
    assert most_ahead() > 5


@pytest.mark.parametrize("kind", ["backup_workers", "gradient_coding"])
def test_stragglers_of_a_region_are_not_waited_for(simulated, kind):
    sections = {
        "regions": [{"name": "a", "workers": 4}, {"name": "b", "workers": 4}],
        "emulate": BASE["emulate"] | {"stalls": {"fraction": 0.05, "factor": 20}, "step_s": 0.1},
        "train": BASE["train"] | {"steps": 24},
    }
    plain = simulated(**sections)
    sections["train"] = sections["train"] | {"stragglers": {"kind": kind}}
    run = simulated(**sections)
    # Coding computes everything twice, and one that is late long leaves no room for another.
    bound = 0.7 if kind == "backup_workers" else 1.0
    assert run.result.seconds < bound * plain.result.seconds
    per_step = {e["samples"] for e in run.of("step")}
    if kind == "gradient_coding":
        assert per_step == {16}, "no row is lost"
    else:
        assert 12 in per_step
    for region in run.world.regions.values():
        region.server.ledger.check()


@pytest.mark.parametrize("scheme", ["fractional", "cyclic"])
def test_coded_gradients_are_the_plain_ones_to_rounding(simulated, scheme):
    import torch

    sections = {
        "regions": [{"name": "a", "workers": 4}, {"name": "b", "workers": 4}],
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": BASE["train"] | {"steps": 6},
        "emulate": BASE["emulate"] | {"stalls": {"fraction": 0.15, "factor": 9}},
    }
    plain = simulated(**sections).result.params_P["a"]
    coding = {"kind": "gradient_coding", "tolerate": 1, "scheme": scheme}
    sections["train"] = sections["train"] | {"stragglers": coding}
    coded = simulated(**sections).result.params_P["a"]
    torch.testing.assert_close(coded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stragglers", "why"),
    [
        ({"kind": "backup_workers", "spares": 2}, "more than 2 workers"),
        ({"kind": "gradient_coding", "tolerate": 1, "scheme": "fractional"}, "multiple of 2"),
    ],
)
def test_what_no_region_can_do_is_refused(stragglers, why):
    regions = [{"name": "a", "workers": 3}, {"name": "b", "workers": 2}]
    with pytest.raises(ConfigError, match=why):
        experiment(regions=regions, train=BASE["train"] | {"stragglers": stragglers})


def test_asynchronous_regions_have_no_stragglers():
    with pytest.raises(ConfigError, match="async"):
        experiment(
            regions=[{"name": "a", "workers": 2}],
            train=BASE["train"] | {"mode": "async", "stragglers": {"kind": "backup_workers"}},
        )
