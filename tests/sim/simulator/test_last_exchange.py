"""The last exchange is coded, pays what is owed, and ends the last round: no residual is lost."""

from __future__ import annotations

import pytest
import torch

from geo_ray.codecs import feedback
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import BASE, Run, experiment, of_kind

TASK = {"use": "digits", "options": {"width": 8}}
TRAIN = BASE["train"] | {"steps": 8}
TOPK = {"kind": "topk", "ratio": 0.05}
ROUNDS = ["bsp", "sma", "diloco"]


def both(codec, **more) -> dict:
    return {"up": codec, "down": codec} | more


def sections(kind: str, codec: dict, **more) -> dict:
    made = of_kind(kind, train=TRAIN, task=TASK) | {"codec": codec} | more
    if kind == "sma":
        made["strategy"] = made["strategy"] | {"interval": 2}
    return made


def owed(run: Run) -> dict[str, float]:
    """What is owed at the end, over what the last message of that way held."""
    found = {}
    for name, region in run.world.regions.items():
        residual_P = region.server.wire._encoder.residual_P
        found[name] = 0.0 if residual_P is None else float(residual_P.norm())
    return found


@pytest.mark.parametrize("kind", ROUNDS)
def test_the_exchange_of_the_last_step_is_the_final_update(simulated, kind):
    """As many exchanges as without a codec, and the last one is exact: bsp and sma end so, too."""
    as_fp32 = simulated(**sections(kind, {}))
    run = simulated(**sections(kind, both(TOPK)))
    exchanges = run.of("exchange", "b")
    assert len(exchanges) == len(as_fp32.of("exchange", "b"))
    size = exchanges[-1]["bytes_sent"]
    bits = 8 * size / run.num_params
    assert bits == pytest.approx(feedback.bits_for_error(0.03), abs=0.2)
    assert exchanges[-1]["bytes_received"] == size
    a_P, b_P = run.result.params_P.values()
    assert torch.equal(a_P, b_P)


@pytest.mark.parametrize("kind", ["bsp", "sma"])
def test_rounds_do_not_lose_the_residual_of_the_last_one(simulated, data_dir, kind):
    """With plain SGD all that was sent adds up: the end is that without a codec, nearly.

    Gradients of later steps do depend on what was sent before, so the rate is small.
    """
    slow = {"optimizer": {"kind": "sgd", "lr": 1e-4}}
    start_P = Run(experiment(**sections(kind, {})), data_dir).world.regions["a"].params_P
    moved_P = next(iter(simulated(**sections(kind, {}, **slow)).result.params_P.values())) - start_P
    for codec in (TOPK, {"kind": "int4"}, {"kind": "int8"}):
        run = simulated(**sections(kind, both(codec), **slow))
        found_P = next(iter(run.result.params_P.values())) - start_P
        assert float((found_P - moved_P).norm() / moved_P.norm()) < 0.08


def test_full_precision_by_option(simulated):
    run = simulated(**sections("sma", both(TOPK, last_error=0.0)))
    exchanges = run.of("exchange", "b")
    assert exchanges[-1]["bytes_sent"] == exchanges[-1]["bytes_received"] == 4 * run.num_params
    coded = simulated(**sections("sma", both(TOPK)))
    saved = run.result.sent_bytes["b", "a"]["update"] - coded.result.sent_bytes["b", "a"]["update"]
    assert saved == 4 * run.num_params - coded.of("exchange", "b")[-1]["bytes_sent"]
    assert saved > 0.7 * 4 * run.num_params


@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_every_strategy_pays_its_debts_with_the_final_update(simulated, kind):
    changes = sections(kind, both(TOPK))
    changes["train"] = changes["train"] | {"steps": 21}
    run = simulated(**changes)
    scale = {name: float(p_P.norm()) for name, p_P in run.result.params_P.items()}
    assert all(owed(run)[name] < 1e-2 * scale[name] for name in scale)


@pytest.mark.parametrize("at", [0.501, 0.503])  # b alone, or both, have sent their final update
@pytest.mark.parametrize("kind", ["bsp", "sma", "asgd_ga", "diloco_streaming"])
def test_a_run_that_ended_goes_on_after_its_coded_final_update(data_dir, kind, at):
    """The final update, open in the checkpoint, is sent again; then more steps follow."""
    config = experiment(**sections(kind, both(TOPK)))
    first = Run(config, data_dir)
    first.world.checkpoint_at(at * TRAIN["steps"], 1)
    first.go()
    more = experiment(**sections(kind, both(TOPK), train=TRAIN | {"steps": 12}))
    again = Run(more, data_dir)
    again.world.restore(first.world.checkpoints[1])
    steps = [e["step"] for e in again.go().of("step", "b")]
    assert steps[-1] == 12
    a_P, b_P = again.result.params_P.values()
    assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_end_with_the_bits_of_one(simulated, shards):
    regions = [{"name": "a", "ps_shards": shards}, {"name": "b"}]
    run = simulated(**sections("bsp", both({"kind": "int4"}), regions=regions))
    assert run.digests() == simulated(**sections("bsp", both({"kind": "int4"}))).digests()


def test_lossy_blocks_end_reliably(simulated):
    """The final update of differential transmission is sent in full, and no part may be lost."""
    codec = {
        "up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4},
        "down": {"kind": "int8"},
    }
    run = simulated(**sections("diloco", codec))
    a_P, b_P = run.result.params_P.values()
    assert torch.equal(a_P, b_P)
    assert run.of("exchange", "b")[-1]["bytes_sent"] == 4 * run.num_params
