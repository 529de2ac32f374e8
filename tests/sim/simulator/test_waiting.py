"""Waiting: no schedule of finite steps on living links ends a run; a strategy that is mute does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import AveragerFailedError, StalledError
from geo_ray.runtime.policies import STALL_S, STUCK_S, RunLimits, RunPolicy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.sma import Sma
from geo_ray.training.averager import open_requests
from tests.support.world_support import Run, experiment, of_kind

NAMES = ("a", "b", "c")
DAY_S = 86400.0
OVERLAYS = ("binary", "rack", "ring", "tsengine")


class Watch:
    """Asks a simulated run what a controller asks a real one, and hands it to the real policy."""

    def __init__(self, run: Run, every_s: float) -> None:
        self._run = run
        self._every_s = every_s
        self.policy = RunPolicy(RunLimits(0, 3, None), 0.0)
        self.looks = 0
        self.longest_s = 0.0
        self._look()

    def _look(self) -> None:
        world = self._run.world
        scheduler = world._scheduler
        servers = {name: region.server for name, region in world.regions.items()}
        still = {n: s.blocked_on for n, s in servers.items() if s.phase != "done"}
        self.policy.check_progress(scheduler.now_s, still, open_requests(world.averager))
        self.longest_s = max(self.longest_s, self.policy.stalled(scheduler.now_s) or 0.0)
        self.looks += 1
        # Often at first, then less: a look per second of a month would take a day.
        later_s = min(STUCK_S / 3, scheduler.now_s / 200)
        scheduler.idly_at(scheduler.now_s + max(self._every_s, later_s), self._look)


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(STRATEGIES)))
    found = of_kind(kind)
    if "interval" in found["strategy"] and "fragments" not in STRATEGIES[kind].model_fields:
        found["strategy"] = found["strategy"] | {"interval": draw(st.integers(1, 40))}
    traits = STRATEGIES[kind]().traits
    base_s = draw(st.sampled_from([0.01, 5.0, 3600.0]))
    skew = st.sampled_from([1.0, 7.0, 60.0])
    found |= {
        "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 2},
        "regions": [{"name": name, "workers": draw(st.integers(1, 2))} for name in NAMES],
        "train": {"steps": draw(st.integers(1, 8)), "eval_every": 0},
        "checkpoint": {"every_s": 60.0 * base_s},  # as often as in other runs, by steps
        "emulate": {
            "step_s_by_region": {name: base_s * draw(skew) for name in NAMES},
            "link": {
                "rate_mbps": draw(st.sampled_from([0.1, 1000.0])),
                "delay_s": draw(st.sampled_from([0.0, 0.2, 20.0])),
            },
        },
    }
    mean = traits.averager.round_mean
    if mean is not None and draw(st.booleans()):
        kinds = [kind for kind in OVERLAYS if mean.is_answer or kind != "ring"]  # see its check
        found["overlay"] = {"kind": draw(st.sampled_from(kinds))}
    return found


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sections=schedules(), every_s=st.sampled_from([0.05, 0.7, STUCK_S / 3]))
def test_no_schedule_of_finite_steps_ends_a_run(
    data_dir: Path, sections: dict[str, Any], every_s: float
) -> None:
    run = Run(experiment(**sections), data_dir)
    watch = Watch(run, every_s)
    run.go()
    assert {region.server.phase for region in run.world.regions.values()} == {"done"}
    assert watch.looks >= 1


def test_a_day_without_a_step_is_told_and_waited_for(data_dir: Path) -> None:
    """Two regions stand still for the third, whose steps take a day each."""
    emulate = {"step_s_by_region": {"a": 0.1, "b": 0.1, "c": DAY_S}}
    sections = {"regions": [{"name": name} for name in NAMES], "emulate": emulate}
    run = Run(experiment(**sections), data_dir)
    watch = Watch(run, 10.0)
    run.go()
    assert run.result.seconds > 4 * DAY_S and watch.longest_s > 100 * STALL_S


def test_a_strategy_that_answers_nobody_ends_the_run(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Sma.on_update

    def on_update(self: Sma, averager: Any, update: Any) -> Any:
        answers = before(self, averager, update)
        return answers if averager.version < 2 else []

    monkeypatch.setattr(Sma, "on_update", on_update)
    with pytest.raises(StalledError, match=r"'a' \(update 2\), 'b' \(update 2\)"):
        Run(experiment(), data_dir).go()


def test_what_a_strategy_raises_is_typed_in_the_simulator_too(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_update(self: Sma, averager: Any, update: Any) -> Any:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(Sma, "on_update", on_update)
    with pytest.raises(AveragerFailedError, match=r"'sma' failed .*no luck .*test_waiting\.py:\d+"):
        Run(experiment(), data_dir).go()
