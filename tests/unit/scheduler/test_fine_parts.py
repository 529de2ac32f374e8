"""PD-ORS with parts of work that fit into a slot, as the live queue uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from geo_ray.scheduler.cluster import SharedCluster
from geo_ray.scheduler.job import ClusterJob
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy
from geo_ray.scheduler.queue.model import adapted
from geo_ray.scheduler.replay import outcome_of, replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from tests.support.scheduling_support import cluster_of, job_of

FINE = PdOrsPolicy(fine=True, window=200)


def lasting(slots: float, cluster: SharedCluster, **changes: Any) -> ClusterJob:
    """Return a job that takes a number of slots on one worker."""
    about: dict[str, Any] = {"most": 1, "per_server": 1, "target": 250.0, "urgency": 0.01}
    about |= {"model_bytes": 0.0} | changes
    step_s = float(job_of(rows=1.0, **about).speed.step_s(1, 8))
    return job_of(rows=slots * cluster.slot_s * 8 / step_s, **about)


@pytest.mark.parametrize("slots", [5.5, 25.0, 120.0])
def test_a_long_job_is_planned_as_long_as_it_takes(slots: float) -> None:
    cluster = cluster_of(np.full((250, 1, 2), 4.0), (0,))
    job = lasting(slots, cluster)
    done = replay_jobs(cluster, [job], FINE)
    check_schedule(done)
    assert done.finished_s["a"] == pytest.approx(slots * cluster.slot_s, rel=1e-6)
    plain = replay_jobs(cluster, [job], PdOrsPolicy(window=200))
    assert plain.finished_s["a"] == pytest.approx(slots * cluster.slot_s, rel=1e-6)


@pytest.mark.parametrize("policy", [FINE, PdOrsPolicy()])
def test_a_job_longer_than_all_slots_has_no_schedule(policy: PdOrsPolicy) -> None:
    cluster = cluster_of(np.full((250, 1, 2), 4.0), (0,))
    done = replay_jobs(cluster, [lasting(300.0, cluster)], policy)
    assert [(each.is_admitted, each.surplus) for each in done.admissions] == [(False, None)]
    assert (outcome_of(done).rejected, outcome_of(done).no_schedule) == (1, 1)


@pytest.mark.parametrize("slots", [190.0, 210.0, 600.0, 50_000.0])
@pytest.mark.parametrize("most", [1, 3, 400])
def test_an_empty_cluster_without_an_end_takes_a_job_of_any_length(slots: float, most: int) -> None:
    cluster = cluster_of(np.full((600, 1, 2), 8.0), (0,))
    job = lasting(slots, cluster, most=most, urgency=0.0, value=1e6)
    done = replay_jobs(cluster, [job], adapted(PdOrsPolicy(), 0.0))
    check_schedule(done)
    (admission,) = done.admissions
    assert admission.is_admitted and admission.surplus is not None and admission.surplus > 0
    assert ("a" in done.finished_s) == (slots <= 600 or (most > 1 and slots < 50_000))


@settings(max_examples=15, deadline=None)
@given(
    slots=st.floats(0.1, 190.0),
    most=st.integers(1, 40),
    per_server=st.integers(1, 4),
    regions=st.integers(1, 3),
    cpus=st.sampled_from([2.0, 3.0, 8.0, 40.0]),
    fine=st.booleans(),
)
def test_no_job_is_without_a_schedule_on_an_empty_cluster(
    slots: float, most: int, per_server: int, regions: int, cpus: float, fine: bool
) -> None:
    """Whatever its maximum: one worker in each region suffices, and ends in time."""
    assume(cpus >= 1 + -(-regions // per_server))  # the servers are in one region
    cluster = cluster_of(np.full((250, regions, 2), cpus), tuple(range(regions)))
    data = dict.fromkeys(range(regions), 1.0 / regions) if regions > 1 else {}
    job = lasting(slots, cluster, most=max(most, regions), per_server=per_server, data=data)
    done = replay_jobs(cluster, [job], replace(FINE, fine=fine))
    check_schedule(done)
    (admission,) = done.admissions
    assert admission.surplus is not None


def test_a_job_of_low_value_differs_from_one_without_a_schedule() -> None:
    cluster = cluster_of(np.full((40, 1, 2), 2.0), (0,))
    first = lasting(38.0, cluster, value=100.0)
    poor = replace(lasting(1.0, cluster, value=1e-9, urgency=5.0, target=0.1), id="poor")
    late = replace(lasting(20.0, cluster, value=100.0), id="late", arrival_slot=30)
    done = replay_jobs(cluster, [first, poor, late], FINE)
    found = {each.job: (each.is_admitted, each.surplus) for each in done.admissions}
    assert found["a"][0]
    assert found["poor"][0] is False and found["poor"][1] is not None
    assert found["late"] == (False, None)


def test_uneven_shares_of_the_data_are_planned_too() -> None:
    cluster = cluster_of(np.full((250, 2, 2), 4.0), (0, 1))
    job = job_of(rows=30_000.0, most=2, per_server=2, target=250.0, data={0: 0.7, 1: 0.3})
    done = replay_jobs(cluster, [job], FINE)
    check_schedule(done)
    assert "a" in done.finished_s
