"""PD-ORS with work in parts that fit a slot, as a live queue asks it."""

from __future__ import annotations

import numpy as np
import pytest
from scheduling_support import cluster_of, job_of

from geo_ray.scheduling.history.replay import replay_jobs
from geo_ray.scheduling.model.validate import check_schedule
from geo_ray.scheduling.policies.pd_ors import PdOrsPolicy

FINE = PdOrsPolicy(fine=True, window=200)


@pytest.mark.parametrize(("slots", "plain_ends"), [(5.5, True), (25.0, False), (120.0, False)])
def test_a_long_job_is_planned_as_long_as_it_takes(slots: float, plain_ends: bool) -> None:
    cluster = cluster_of(np.full((250, 1, 2), 4.0), (0,))
    job = job_of(rows=1.0, most=1, per_server=1, target=250.0, urgency=0.01)
    per_slot = cluster.slot_s * 8 / float(job.speed.step_s(1, 8))
    job = job_of(
        rows=slots * per_slot, most=1, per_server=1, target=250.0, urgency=0.01, model_bytes=0.0
    )
    done = replay_jobs(cluster, [job], FINE)
    check_schedule(done)
    assert done.finished_s["a"] == pytest.approx(slots * cluster.slot_s, rel=1e-6)
    plain = replay_jobs(cluster, [job], PdOrsPolicy(window=200))
    assert ("a" in plain.finished_s) == plain_ends


def test_a_job_longer_than_the_window_is_turned_away() -> None:
    cluster = cluster_of(np.full((250, 1, 2), 4.0), (0,))
    job = job_of(rows=1e9, most=1, per_server=1, target=250.0)
    done = replay_jobs(cluster, [job], FINE)
    assert [each.is_admitted for each in done.admissions] == [False]


def test_uneven_shares_of_the_data_are_planned_too() -> None:
    cluster = cluster_of(np.full((250, 2, 2), 4.0), (0, 1))
    job = job_of(rows=30_000.0, most=2, per_server=2, target=250.0, data={0: 0.7, 1: 0.3})
    done = replay_jobs(cluster, [job], FINE)
    check_schedule(done)
    assert "a" in done.finished_s
