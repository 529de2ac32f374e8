"""Bad links delay and lose nothing; bad gradients and dead ends are errors with a name."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import InvariantError, NonFiniteError
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import BASE, Run, experiment, of_kind

OUTAGE = (0.9, 2.9)


def with_link(**more):
    return {"emulate": BASE["emulate"] | {"link": BASE["emulate"]["link"] | more}}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_outage_delays_and_loses_nothing(simulated, kind):
    sections = of_kind(kind, train=BASE["train"] | {"steps": 9})
    calm = simulated(**sections)
    run = simulated(**sections | with_link(outages=[OUTAGE]))
    for name in "ab":
        if not STRATEGIES[kind]().traits.region.ends_by_total_rows:
            assert len(run.of("step", name)) == 9
        seqs = [e["seq"] for e in run.of("exchange", name)]
        assert seqs == list(range(1, len(seqs) + 1))  # every request has its one answer
    assert not [e for e in run.of("exchange", "b") if OUTAGE[0] <= e.t_s < OUTAGE[1]]
    assert run.result.seconds >= calm.result.seconds
    assert len(run.of("step")) >= 18
    if (
        STRATEGIES[kind]().traits.in_rounds
        and not STRATEGIES[kind]().traits.region.ends_by_total_rows
    ):
        assert run.digests() == calm.digests()
        if kind == "bsp":  # it was under way when the link broke
            assert run.result.seconds > calm.result.seconds + 1.0


def test_an_outage_stops_no_region_that_need_not_wait(simulated):
    sections = {"strategy": {"kind": "asgd_ga", "interval": 2}}
    sections["train"] = BASE["train"] | {"steps": 9}
    calm, run = simulated(**sections), simulated(**sections, **with_link(outages=[OUTAGE]))
    for name in "ab":
        assert [e.t_s for e in run.of("step", name)] == [e.t_s for e in calm.of("step", name)]
    assert len(run.of("exchange", "b")) < len(calm.of("exchange", "b"))  # the sum grew instead


@pytest.mark.parametrize("kind", ["bsp", "sma"])
def test_loss_and_jitter_change_times_and_no_bits(simulated, kind):
    sections = {"strategy": {"kind": kind}, "train": BASE["train"] | {"steps": 8}}
    calm = simulated(**sections)
    rough = simulated(**sections, **with_link(loss=0.3, jitter_s=0.02))
    assert rough.digests() == calm.digests()
    assert rough.result.seconds > calm.result.seconds
    assert rough.result.sent_bytes == calm.result.sent_bytes


@pytest.mark.parametrize("regions", [["a"], ["a", "b"]])
def test_a_run_without_finite_gradients_ends_with_an_error(simulated, regions):
    """The first step throws the parameters far away; from then on there is no finite loss."""
    with pytest.raises(NonFiniteError):
        simulated(
            regions=[{"name": name} for name in regions],
            optimizer={"kind": "sgd", "lr": 1e6, "weight_decay": 1e20},
            strategy={"kind": "asgd_ga", "interval": 100},
            train={"steps": 50, "eval_every": 0, "max_refused_steps": 2},
        )


def test_a_dead_end_is_an_error_and_no_short_run(data_dir):
    run = Run(experiment(), data_dir)
    run.world.take_in = lambda *_: None  # an averager that never answers
    with pytest.raises(InvariantError, match="waiting"):
        run.go()


def test_a_region_that_refuses_steps_does_not_hold_up_rounds(simulated, monkeypatch):
    from geo_ray.training.worker import StepResult, Worker

    real = Worker.step

    def sometimes(self, columns, span):
        if self._stream.endswith("/b") and span.start % 8 == 0:
            return StepResult(None, "loss_not_finite")
        return real(self, columns, span)

    monkeypatch.setattr(Worker, "step", sometimes)
    for kind, strategy in STRATEGIES.items():
        if strategy().traits.region.worker_steps or strategy().traits.region.ends_by_total_rows:
            continue  # a push is several steps; or how many there are depends on the time
        run = simulated(**of_kind(kind, train=BASE["train"] | {"steps": 8}))
        assert [e["step"] for e in run.of("step_refused", "b")] == [1, 3, 5, 7]
        assert sum(e["samples"] for e in run.of("step", "b")) == 4 * 4
        assert len(run.of("step", "a")) == 8
