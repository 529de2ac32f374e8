"""The rule of acceptance at its edges, and what a record of a run says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from geo_ray.lab.stats import FEW, CapStats, LabStats, LinkStats, LinkTimes, RelayTimes, judge

IN_TIME = LinkTimes(0.1, 1000, 0, 0.0, 1000, 0, 0.25)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"given_late": 50}, ""),
        ({"given_late": 51}, r"A, 100 ms: 5.1% of the packets late"),
        ({"taken_late": 51}, r"A, 100 ms: 5.1% of the packets late"),
        ({"given_late": 50, "taken_late": 50}, ""),  # the larger share, not the sum
        ({"given_late_sum_s": 0.999}, ""),
        ({"given_late_sum_s": 1.1}, r"mean lateness 1.1 times what is allowed"),
        ({"given_late_sum_s": 0.6, "taken_late_sum_s": 0.6}, "mean lateness 1.2 times"),
        ({"round_trip_s": 0.4, "given_late_sum_s": 3.9}, ""),  # 4 ms are allowed there
        ({"round_trip_s": 0.002, "given_late_sum_s": 0.9}, ""),  # never less than 1 ms
    ],
)
def test_a_link_is_in_time_or_not(changes: dict[str, float], why: str) -> None:
    verdict = judge({"A": replace(IN_TIME, **changes), "B": IN_TIME})
    assert verdict.accepted is (not why)
    assert why in "; ".join(verdict.why)


def test_links_of_few_packets_are_judged_together() -> None:
    few = LinkTimes(0.1, 10, 2, 0.0, 10, 2, 0.0)  # 20 % of its packets
    quiet = replace(IN_TIME, taken=90, given=90, given_late_sum_s=0.0)
    assert judge({"idle": few, "quiet": quiet, "busy": IN_TIME}).accepted
    verdict = judge({"idle": few, "busy": IN_TIME})
    assert [sentence.split(":")[0] for sentence in verdict.why] == [FEW]


def test_nothing_measured_is_in_time() -> None:
    assert judge({}).accepted
    assert judge({"idle": LinkTimes(0.1, 0, 0, 0.0, 0, 0, 0.0)}).accepted


@pytest.mark.parametrize(
    ("late_s", "own_s", "waited_s", "stolen_s", "cause"),
    [
        (0.0, 0.0, 5.0, 5.0, ""),
        (1.0, 0.5, 5.0, 5.0, "relay"),
        (1.0, 0.1, 0.2, 0.6, "stolen"),
        (1.0, 0.1, 0.6, 0.2, "run queue"),
        (1.0, 0.1, None, 0.6, "stolen"),
        (1.0, 0.1, 0.2, 0.2, "unknown"),  # the kernel saw less than half of it
    ],
)
def test_the_cause_accounts_for_at_least_half(
    late_s: float, own_s: float, waited_s: float | None, stolen_s: float, cause: str
) -> None:
    times = RelayTimes(10.0, late_s, own_s, waited_s, stolen_s, 2)
    assert times.cause == cause
    assert times.stolen_fraction == pytest.approx(stolen_s / 20)


def test_a_rejected_run_keeps_its_numbers_and_the_reason() -> None:
    link = LinkStats(
        rate_mbps=100.0, delay_s=0.05, loss=0.0, in_packets=1000, in_bytes=10**6, out_packets=1000,
        out_bytes=10**6, lost=0, queue_drops=0, cap_drops=0, cut_drops=0, device_drops=0,
        late_packets=60, late_mean_s=0.0004, late_max_s=0.3, round_trip_s=0.1,
        taken_late_packets=0, taken_late_mean_s=0.0, queue_bytes=0, queue_peak_bytes=0, waiting=0,
        is_cut=False,
    )  # fmt: skip
    cap = {"A": CapStats(None, 0, 0)}
    stats = LabStats(
        seconds=10.0, cpu_s=2.0, realtime=True, read_packets=1000, pass_max_s=0.001, late_s=0.4,
        own_s=0.01, late_max_s=0.3, waited_s=0.02, stolen_s=0.5, cores=2, unrouted=0,
        links={("A", "B"): link}, up=cap, down=cap, congestion_control={"A": "cubic"},
    )  # fmt: skip
    kept = json.loads(json.dumps(stats.record()))
    assert stats.was_late and kept["accepted"] is False
    assert kept["why"] == ["A -> B, 100 ms: 6.0% of the packets late (allowed: 5 %)"]
    assert kept["relay"]["cause"] == "stolen" and kept["relay"]["stolen_fraction"] == 0.025
    assert kept["links"]["A -> B"]["late_fraction"] == 0.06
    assert stats.cpu_fraction == 0.2
