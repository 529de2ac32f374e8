"""The simulator's clock, its bytes and its determinism."""

from __future__ import annotations

import pytest
import torch

from geo_ray.simulator.network import FRAME_BYTES
from geo_ray.simulator.world import LAN_S
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.telemetry.summary import Target
from tests.support.world_support import BASE, of_kind

STEP_S, DELAY_S, RATE_MBPS = 0.5, 0.03, 10
NO_EVAL = BASE["train"]
PLAIN = ["bsp", "asgd", "asgd_ga", "ama", "sma"]
LEARNING = {
    "task": {"use": "digits", "options": {"width": 8}},
    "data": BASE["data"] | {"batch_size": 16},
    "optimizer": {"kind": "momentum", "lr": 0.05},
}


def round_trip_s(run) -> float:
    """Both directions of one exchange over the link, without any waiting for others."""
    return 2 * (DELAY_S + (4 * run.num_params + FRAME_BYTES) * 8e-6 / RATE_MBPS)


def steps_s(steps: int, step_s: float = STEP_S) -> float:
    """Parameters to the worker, the step, the gradient back."""
    return steps * (step_s + 2 * LAN_S)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_same_experiment_gives_the_same_events_and_parameters(simulated, kind):
    jittery = {"link": {"rate_mbps": 10, "delay_s": 0.03, "jitter_s": 0.02, "loss": 0.05}}
    sections = of_kind(
        kind,
        emulate=jittery | {"step_s": 0.1, "step_s_by_region": {"b": 0.13}},
        train={"steps": 9, "eval_every": 4},
    )
    first, second = simulated(**sections), simulated(**sections)
    assert first.events == second.events and first.digests() == second.digests()
    other = simulated(**sections, seed=1)
    assert other.digests() != first.digests()


def test_sma_takes_its_steps_and_its_round_trips(simulated):
    run = simulated()
    expected_s = steps_s(4) + 2 * round_trip_s(run) + LAN_S  # workers exit with the last answer
    assert run.result.seconds == pytest.approx(expected_s, rel=1e-12)
    assert run.result.rounds == 2
    assert len(set(run.digests().values())) == 1


def test_a_last_shorter_round_is_one_more(simulated):
    run = simulated(train=NO_EVAL | {"steps": 5, "optimizer_on": "server"})
    expected_s = steps_s(5) + 3 * round_trip_s(run) + LAN_S
    assert run.result.seconds == pytest.approx(expected_s, rel=1e-12)


def test_bsp_pays_for_every_step(simulated):
    run = simulated(strategy={"kind": "bsp"})
    expected_s = steps_s(4) + 4 * round_trip_s(run) + LAN_S
    assert run.result.seconds == pytest.approx(expected_s, rel=1e-12)


def test_asgd_that_waits_pays_for_every_step_of_which_the_last_is_the_end(simulated):
    run = simulated(strategy={"kind": "asgd"})
    expected_s = steps_s(4) + 4 * round_trip_s(run) + LAN_S
    assert run.result.seconds == pytest.approx(expected_s, rel=1e-12)
    assert run.of("step", "a")[-1].t_s == pytest.approx(steps_s(4), rel=1e-12)  # at the averager


def test_overlap_hides_the_link(simulated):
    run = simulated(strategy={"kind": "asgd", "wait": "when_busy"})
    assert round_trip_s(run) < STEP_S
    assert run.of("step", "b")[-1].t_s == pytest.approx(steps_s(4), rel=1e-12)
    assert run.of("exchange", "b")[0].t_s == pytest.approx(steps_s(1) + round_trip_s(run))


def test_one_region_alone_has_no_network(simulated):
    run = simulated(regions=[{"name": "a", "workers": 2}])
    assert run.result.seconds == pytest.approx(steps_s(4) + LAN_S, rel=1e-12)
    assert run.result.sent_bytes == {} and run.result.rounds == 0
    assert not run.of("exchange")
    assert sum(e["samples"] for e in run.of("step")) == 4 * 2 * 4


def test_without_emulated_links_messages_take_no_time(simulated):
    run = simulated(emulate={"step_s": 0.5})
    assert run.result.seconds == pytest.approx(steps_s(4) + LAN_S, rel=1e-12)
    assert run.result.sent_bytes  # they are counted all the same


def test_bytes_are_counted_per_direction(simulated):
    run = simulated()
    size_bytes = 2 * (4 * run.num_params + FRAME_BYTES)
    sent = {("b", "a"): {"update": size_bytes}, ("a", "b"): {"reply": size_bytes}}
    assert run.result.sent_bytes == sent  # the averager is in a; its own region's are not sent
    assert {(e["src"], e["dst"]): e["bytes_by_class"] for e in run.of("wan")} == sent
    moved = simulated(averager={"region": "b"})
    assert moved.result.sent_bytes == {
        ("a", "b"): {"update": size_bytes},
        ("b", "a"): {"reply": size_bytes},
    }
    assert moved.digests() == run.digests()


def test_a_slow_direction_is_only_that_one(simulated):
    slow = {"src": "b", "dst": "a", "rate_mbps": 1, "delay_s": 0.2}
    run = simulated(emulate=BASE["emulate"] | {"links": [slow]})
    size_bytes = 4 * run.num_params + FRAME_BYTES
    trip_s = (0.2 + size_bytes * 8e-6 / 1) + (DELAY_S + size_bytes * 8e-6 / RATE_MBPS)
    assert run.result.seconds == pytest.approx(steps_s(4) + 2 * trip_s + LAN_S, rel=1e-12)


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga", "ama"])
def test_uneven_regions_do_not_wait_for_each_other(simulated, kind):
    """Seen from the averager's region, which has no link to wait for."""
    options = {} if kind == "asgd" else {"interval": 2}
    emulate = BASE["emulate"] | {"step_s": 0.1, "step_s_by_region": {"b": 0.3}}
    run = simulated(
        strategy={"kind": kind, **options}, emulate=emulate, train=NO_EVAL | {"steps": 8}
    )
    assert run.of("step", "a")[-1].t_s == pytest.approx(steps_s(8, 0.1), rel=1e-12)
    if kind != "asgd":  # nor for the link
        assert run.of("step", "b")[-1].t_s == pytest.approx(steps_s(8, 0.3), rel=1e-12)
    assert [len(run.of("step", name)) for name in "ab"] == [8, 8]


def test_rounds_go_at_the_pace_of_the_slowest(simulated):
    emulate = BASE["emulate"] | {"step_s": 0.1, "step_s_by_region": {"b": 0.3}}
    run = simulated(emulate=emulate)
    expected_s = steps_s(4, 0.3) + 2 * round_trip_s(run) + LAN_S
    assert run.result.seconds == pytest.approx(expected_s, rel=1e-12)
    assert [e["compute_s"] for e in run.of("step", "a")] == [0.1] * 4
    assert run.of("step", "a")[2]["wait_s"] > 0.4


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_target_stops_all_regions_early(simulated, kind):
    target = {"metric": "accuracy", "value": 0.4, "direction": "at_least"}
    train = {"steps": 200, "eval_every": 10, "target": target}
    run = simulated(**of_kind(kind, **LEARNING, train=train))
    (stop,) = run.of("stop_requested")
    assert "accuracy" in stop["cause"]
    last = {name: run.of("step", name)[-1]["step"] for name in "ab"}
    assert max(last.values()) < 100
    if (
        STRATEGIES[kind]().traits.in_rounds
        and not STRATEGIES[kind]().traits.region.ends_by_total_rows
    ):
        assert last["a"] == last["b"]
    finals = [e for e in run.of("eval") if e["final"]]
    assert {e["region"] for e in finals} == {"a", "b", None}


def test_a_single_region_stops_at_its_target(simulated):
    target = {"metric": "loss", "value": 2.0, "direction": "at_most"}
    train = {"steps": 200, "eval_every": 10, "target": target}
    run = simulated(**LEARNING, regions=[{"name": "a"}], train=train)
    (stop,) = run.of("stop_requested")
    assert run.of("step")[-1]["step"] == 2 + next(
        e["step"] for e in run.of("eval") if e["metrics"]["loss"] <= 2.0
    )  # the steps of the second after the evaluation were being computed
    assert stop.t_s < run.result.seconds


@pytest.mark.parametrize("kind", [*PLAIN, "diloco_streaming", "halos", "fedavg"])
def test_shards_of_the_server_give_the_same_bits(simulated, kind):
    sections = of_kind(kind)
    for optimizer in ({"kind": "adamw", "lr": 0.01}, {"kind": "momentum"}):
        digests = [
            simulated(
                **sections
                | {
                    "optimizer": optimizer,
                    "train": NO_EVAL | {"steps": 9},
                    "regions": [{"name": "a", "ps_shards": shards}, {"name": "b", "ps_shards": 3}],
                },
            ).digests()
            for shards in (1, 2)
        ]
        assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_workers_that_do_not_wait_for_each_other(simulated, kind):
    strategy = STRATEGIES[kind]()
    workers = 2 if strategy.traits.in_rounds else 3
    sections = of_kind(
        kind,
        regions=[{"name": "a", "workers": 2}, {"name": "b", "workers": workers}],
        train={"steps": 6, "eval_every": 2, "mode": "async"},
    )
    run = simulated(**sections)
    pushes = {name: len(run.of("step", name)) for name in "ab"}
    if not strategy.traits.region.ends_by_total_rows:
        assert pushes == {"a": 12, "b": 6 * workers}
    else:
        assert 6 * (2 + workers) <= sum(pushes.values()) < 12 * (2 + workers)
    assert {e["samples"] for e in run.of("step")} == {4 * max(1, run.config.worker_steps)}
    together = [e for e in run.of("eval") if e["region"] is None]
    assert len(together) >= 3  # at two dates, and at the end
    heldout = sum({e["region"]: e["samples"] for e in run.of("eval") if e["region"]}.values())
    assert {e["samples"] for e in together} == {heldout}


@pytest.mark.parametrize("kind", ["bsp", "sma"])
@pytest.mark.parametrize("slow_s", [0.13, 0.5, 0.71])
def test_a_target_stops_asynchronous_rounds_too(simulated, kind, slow_s):
    """One region may have a gradient in the making that another has not."""
    target = {"metric": "loss", "value": 2.25, "direction": "at_most"}
    run = simulated(
        **LEARNING,
        strategy={"kind": kind},
        regions=[{"name": "a", "workers": 3}, {"name": "b", "workers": 3}],
        emulate=BASE["emulate"] | {"step_s_by_region": {"b": slow_s}},
        train={"steps": 60, "eval_every": 3, "mode": "async", "target": target},
    )
    assert run.of("stop_requested")
    assert len(run.of("step", "a")) == len(run.of("step", "b")) < 180
    assert len(set(run.digests().values())) == 1


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_learns_the_digits(simulated, kind):
    # Long enough for the slowest of them to be well past it: machines round differently.
    run = simulated(**of_kind(kind, **LEARNING, train={"steps": 180, "eval_every": 0}))
    (last,) = [e for e in run.of("eval") if e["region"] is None]
    assert last["metrics"]["accuracy"] >= 0.9


def test_live_parameters_are_evaluated_if_asked_for(simulated):
    """In the middle of a round they are ahead of what the averager knows; at its end they agree."""
    losses = {}
    for evaluate in ("outer", "live"):
        train = {"steps": 12, "eval_every": 6, "evaluate": evaluate}
        run = simulated(
            strategy={"kind": "diloco", "interval": 12, "outer": {"kind": "sgd"}},
            train=train,
            **LEARNING,
        )
        evals = sorted(run.of("eval", None), key=lambda e: e["step"])
        losses[evaluate] = [e["metrics"]["loss"] for e in evals if e["region"] is None]
    middle, end = zip(losses["outer"], losses["live"], strict=True)
    assert middle[0] > middle[1] and end[0] == end[1]


def test_workers_with_batches_of_their_own_are_one_larger_batch(simulated):
    """A plan gives faster machines more rows; the step is that of all rows together."""
    shapes = {
        "one": {"workers": 1, "batch_sizes": [8]},
        "two": {"workers": 2, "batch_sizes": [3, 5]},
    }
    params = {}
    for name, shape in shapes.items():
        run = simulated(
            regions=[{"name": "a", **shape}, {"name": "b", **shape}],
            train={"steps": 6, "eval_every": 0},
            **LEARNING,
        )
        assert run.result.seconds > 0
        params[name] = run.result.params_P["a"]
        assert sum(e["samples"] for e in run.of("step", "a")) == 48
    assert torch.allclose(params["one"], params["two"], rtol=0, atol=1e-5)


def test_a_target_that_does_not_stop_is_timed(simulated):
    target = {"metric": "accuracy", "value": 0.2, "direction": "at_least"}
    ends = {}
    for stop in (True, False):
        train = {"steps": 60, "eval_every": 5, "target": target | {"stop": stop}}
        run = simulated(train=train, **LEARNING)
        reached = [e.t_s for e in run.of("eval") if Target(**target).reached(e)]
        ends[stop] = run.result.seconds, reached[0]
    assert ends[True][1] == ends[False][1]
    assert ends[True][0] < ends[False][0]
