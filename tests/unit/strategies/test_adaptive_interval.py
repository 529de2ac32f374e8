"""An interval that follows the link, and does not follow every packet."""

from __future__ import annotations

import torch

from geo_ray.strategies.diloco import PATIENCE, adaptive_interval
from geo_ray.strategies.state import AveragerState, Update


def round_of(*times: tuple[float, float]) -> list[Update]:
    return [
        Update(f"r{i}", torch.zeros(1), 1, step_s=step_s, exchange_s=exchange_s)
        for i, (step_s, exchange_s) in enumerate(times)
    ]


def after(
    averager: AveragerState, rounds: int, *times: tuple[float, float], share: float = 0.9
) -> int:
    for _ in range(rounds):
        found = adaptive_interval(averager, round_of(*times), share, first=8)
    return found


def test_nothing_measured_leaves_it_as_configured():
    assert after(AveragerState(("r0",)), 9, (0.0, 0.0)) == 8
    assert after(AveragerState(("r0",)), 9, (0.1, 0.0)) == 8


def test_it_becomes_the_power_of_two_that_computes_enough():
    # 0.9 of a round is computing if 9 exchanges fit in: 9 * 0.2 / 0.1 = 18 steps
    assert after(AveragerState(("r0",)), PATIENCE, (0.1, 0.2)) == 32
    assert after(AveragerState(("r0",)), PATIENCE, (0.1, 0.001)) == 1


def test_the_slowest_step_and_the_slowest_link_count():
    assert after(AveragerState(("r0", "r1")), PATIENCE, (0.1, 0.02), (0.05, 0.2)) == 32


def test_one_late_packet_changes_nothing():
    averager = AveragerState(("r0",))
    calm, slow = (0.1, 0.08), (0.1, 4.0)
    assert after(averager, PATIENCE, calm) == 8
    for _ in range(5):
        assert after(averager, PATIENCE - 1, slow) == 8
        assert after(averager, 1, (0.1, 0.001)) == 8  # the other direction: votes begin anew
    assert after(averager, PATIENCE, slow) == 512
    assert after(averager, PATIENCE - 1, calm) == 512
    assert after(averager, 1, calm) == 8
