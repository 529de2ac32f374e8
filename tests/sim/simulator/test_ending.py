"""How runs end: the request due at the last step is the final update, and no debt is left."""

from __future__ import annotations

import pytest

from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import BASE, Run, of_kind

TOPK = {"kind": "topk", "ratio": 0.05}
CODED = {"up": TOPK, "down": TOPK}
APART = [  # an exchange after the last step in any case
    "asgd_ga",
    "ama",
    "halos",
    "decoupled",
    "one_step_delay",
    "diloco_eager",
    "diloco_streaming",
    "cocodc",
    "async_local_sgd",
    "dc_asgd",
]
BLOCKING = ["bsp", "sma", "diloco", "muloco", "fedssgd", "hfa", "demo", "esync"]


def sections(kind: str, steps: int, **more) -> dict:
    made = of_kind(kind, train=BASE["train"] | {"steps": steps}) | more
    fields = STRATEGIES[kind].model_fields
    options = {"interval": 4} if "interval" in fields else {}
    options |= {"fragments": 2} if "fragments" in fields else {}
    options |= {"tau": 1} if "tau" in fields else {}
    return made | {"strategy": made["strategy"] | options}


def ends_s(run: Run, region: str) -> float:
    """When its last step was applied."""
    return run.of("step", region)[-1].t_s


@pytest.mark.parametrize("kind", APART)
def test_what_is_due_at_the_last_step_goes_with_the_final_update(simulated, kind):
    run = simulated(**sections(kind, 8))
    for region in "ab":
        begun_s = [event["start_s"] for event in run.of("exchange", region)]
        assert sum(at_s >= ends_s(run, region) for at_s in begun_s) == 1


@pytest.mark.parametrize("kind", ["asgd_ga", "ama", "decoupled", "halos", "gaia"])
def test_who_never_stands_still_begins_nothing_that_would_be_under_way_at_the_end(simulated, kind):
    """Exchanges take nearly three steps: of those that are due, the last cannot be over in time."""
    slow = {"link": {"rate_mbps": 100, "delay_s": 0.7}, "step_s": 0.5}
    made = sections(kind, 15, emulate=slow)
    run = simulated(**made | {"strategy": made["strategy"] | {"interval": 2}})
    *before, last = run.of("exchange", "b")
    end_s = ends_s(run, "b")
    assert len(before) > 2 and all(event.t_s <= end_s for event in before)
    assert end_s <= last["start_s"] < end_s + 0.1


def share_owed(run: Run) -> float:
    """What the regions' codecs owe at the end, over what their models moved."""
    shares = []
    for region in run.world.regions.values():
        residual_P = region.server.wire._encoder.residual_P
        owed = 0.0 if residual_P is None else float(residual_P.norm())
        shares.append(owed / float(region.params_P.norm()))
    return max(shares)


@pytest.mark.parametrize("kind", BLOCKING)
def test_debts_are_paid_where_regions_end_together(simulated, kind):
    """The averager tells them of the last round one round before, and no round is added."""
    train = BASE["train"] | {"count": "total"}
    made = sections(kind, 12, codec=CODED)
    made = made | {"train": train | {"steps": 12}}
    run = simulated(**made)
    plain = simulated(**made | {"codec": {}})
    assert len(run.of("exchange", "b")) == len(plain.of("exchange", "b"))
    assert share_owed(run) < 1e-2
    assert len(set(run.digests().values())) == 1


def test_a_last_round_that_was_shorter_than_expected_is_none(simulated):
    """It goes on until there are enough rows: a refused gradient has none."""
    train = BASE["train"] | {"steps": 12, "count": "total", "max_refused_steps": 50}
    run = simulated(**sections("sma", 12, codec=CODED) | {"train": train})
    assert run.world.averager.samples >= run.config.rows


@pytest.mark.parametrize("kind", ["bsp", "sma", "diloco"])
def test_debts_are_paid_where_a_target_ends_the_run(simulated, kind):
    """One round later than it was reached, which is said in the same words as ever."""
    train = {
        "steps": 40,
        "eval_every": 4,
        "target": {"metric": "accuracy", "value": 0.01, "direction": "at_least"},
    }
    run = simulated(**sections(kind, 40, codec=CODED) | {"train": train})
    (stopped,) = run.of("stop_requested")
    assert ends_s(run, "a") < 39 * 0.5 and stopped.t_s < ends_s(run, "a")
    assert share_owed(run) < 1e-2
    assert len(set(run.digests().values())) == 1


@pytest.mark.parametrize(
    "kind", ["asgd_ga", "ama", "gaia", "halos", "async_local_sgd", "decoupled"]
)
def test_who_has_finished_is_waited_for_by_nobody(simulated, kind):
    """A fast region sends its final update once, however long the others continue."""
    made = sections(kind, 16, regions=[{"name": "a"}, {"name": "b"}, {"name": "c"}])
    options = {"interval": 2, "by_speed": False, "quorum": 3, "staleness": {"bound": 1}}
    fields = STRATEGIES[kind].model_fields
    made["strategy"] |= {name: value for name, value in options.items() if name in fields}
    made["emulate"] = BASE["emulate"] | {"step_s_by_region": {"c": 2.0}}
    run = simulated(**made)
    for region in "abc":
        begun_s = [event["start_s"] for event in run.of("exchange", region)]
        assert sum(at_s >= ends_s(run, region) for at_s in begun_s) == 1
