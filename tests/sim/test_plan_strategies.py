"""Plans of every strategy against the simulator, in time and egress; or refused by name."""

from __future__ import annotations

import pytest

from benchmarks.planning.strategy_terms import STRATEGIES as SECTIONS
from benchmarks.planning.strategy_terms import deviations
from geo_ray.errors import ConfigError
from geo_ray.strategies.registry import STRATEGIES

REFUSED = {"fedavg", "esync", "nbsync", "fedat", "fedgsync"}


def test_every_strategy_is_tried():
    assert SECTIONS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("kind", sorted(STRATEGIES.keys() - REFUSED))
def test_a_plan_says_what_the_simulator_says(kind, tmp_path, monkeypatch):
    """On a link that exchanges do not fit on, with regions of unequal speed."""
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    time, egress = deviations(kind, 4.0, 3.0, tmp_path)
    assert abs(time) < 0.1 and abs(egress) < 0.1, (time, egress)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_who_takes_unequal_numbers_of_steps_is_refused_by_name(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    with pytest.raises(ConfigError, match=f"strategy {kind} cannot be planned"):
        deviations(kind, 4.0, 3.0, tmp_path)
