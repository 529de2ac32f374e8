"""Plans of every strategy against the simulator, in time and egress; others are rejected."""

from __future__ import annotations

import pytest

import geo_ray
from benchmarks.planning.strategy_terms import STRATEGIES as SECTIONS
from benchmarks.planning.strategy_terms import config, deviations
from geo_ray.base.errors import ConfigError
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.telemetry.summary import TOTAL, load_cost

REFUSED = {"fedavg", "esync", "nbsync", "fedat", "fedgsync"}


def test_every_strategy_is_tried():
    assert SECTIONS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("kind", sorted(STRATEGIES.keys() - REFUSED))
def test_a_plan_says_what_the_simulator_says(kind, tmp_path, monkeypatch):
    """On a link that is too slow for the exchanges, with regions of unequal speed."""
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    time, egress = deviations(kind, 4.0, 3.0, tmp_path)
    assert abs(time) < 0.1 and abs(egress) < 0.1, (time, egress)


@pytest.mark.parametrize(("kind", "local"), [("bsp", 1), ("hfa", 2)])
def test_overhead_and_lan_are_counted_once_per_push(kind, local, tmp_path, monkeypatch):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    for overhead_s, lan_s in ((0.4, 0.1), (0.0, 0.0)):
        given = f"step_overhead_s: {overhead_s}\n  lan_s_per_machine: {lan_s}"
        text = config(kind, 10_000.0, 1.0, 16).replace("startup_s: 0", f"startup_s: 0\n  {given}")
        (tmp_path / "beside.yaml").write_text(text)
        made = geo_ray.plan("beside.yaml", ["run.dir=runs"], policy="fixed")
        run = geo_ray.simulate("beside.yaml", ["run.dir=runs"], plan=made)
        inside_s = made.plan.seconds.get("inside the region", 0.0)
        assert inside_s == pytest.approx(16 * (overhead_s + lan_s))
        assert made.plan.seconds["compute"] == pytest.approx(16 * local * 0.1)
        total = next(r for r in load_cost(run.path).rows if r.unit == "s" and r.term == TOTAL)
        assert total.actual == pytest.approx(total.estimated, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("bsp", 17), ("diloco", 16), ("diloco", 17), ("sma", 17), ("sparseloco", 16)],
)
def test_the_exchange_that_pays_what_is_owed_has_its_own_bytes(kind, steps, tmp_path, monkeypatch):
    """After the last step or, where that is the end of a round, as that of the last step."""
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    text = config(kind, 100.0, 1.0, steps).replace("codecs: [null]", "codecs: [int4]")
    (tmp_path / "owing.yaml").write_text(text.replace("width: 24", "width: 96"))
    made = geo_ray.plan("owing.yaml", ["run.dir=runs"], policy="fixed")
    run = geo_ray.simulate("owing.yaml", ["run.dir=runs"], plan=made)
    egress = next(row for row in load_cost(run.path).rows if row.term == "egress")
    assert egress.actual == pytest.approx(egress.estimated, rel=0.005)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_who_takes_unequal_numbers_of_steps_is_refused_by_name(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    with pytest.raises(ConfigError, match=f"strategy {kind} cannot be planned"):
        deviations(kind, 4.0, 3.0, tmp_path)
