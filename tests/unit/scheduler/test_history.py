"""Replays: rejected jobs, the cost of changes, spot preemptions; and the schedule validator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from geo_ray.base.errors import InvariantError, ScheduleInputError
from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.policies.fifo import FifoPolicy
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy, oasis
from geo_ray.scheduler.policies.registry import POLICIES, policy_named
from geo_ray.scheduler.policies.tiresias import TiresiasPolicy
from geo_ray.scheduler.replay import outcome_of, replay_jobs
from geo_ray.scheduler.schedule import ClusterSchedule, check_schedule, violations
from tests.support.scheduling_support import cluster_of, job_of


def plain_cluster(slots: int = 12) -> SharedCluster:
    return cluster_of(np.full((slots, 2, 2), 4.0), (0, 0))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (job_of(worker=(9.0, 1.0)), "larger than the cluster"),
        (job_of(server=(0.0, 5.0)), "larger than the cluster"),
        (job_of(arrival=-1), "before slot 0"),
        (job_of(rows=0.0), "no work"),
        (job_of(data={3: 1.0}), "unknown region"),
        (job_of(data={0: 0.5, 1: 0.5}, most=1), "fewer workers than regions"),
    ],
)
def test_jobs_that_cannot_run_are_refused(job: object, words: str) -> None:
    cluster = cluster_of(np.full((4, 2, 2), 4.0), (0, 1))
    with pytest.raises(ScheduleInputError, match=words):
        replay_jobs(cluster, [job], FifoPolicy())  # type: ignore[list-item]


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ScheduleInputError, match="two jobs"):
        replay_jobs(plain_cluster(), [job_of("a"), job_of("a")], FifoPolicy())


def test_a_cluster_that_contradicts_itself_is_refused() -> None:
    cluster = plain_cluster()
    with pytest.raises(ScheduleInputError, match="negative capacity"):
        replace(cluster, capacity_TSR=-cluster.capacity_TSR)
    with pytest.raises(ScheduleInputError, match="prices"):
        replace(cluster, usd_per_h_TSR=cluster.usd_per_h_TSR[:1])


def test_a_policy_that_is_not_there_is_named_with_its_neighbour() -> None:
    with pytest.raises(ScheduleInputError, match="did you mean fifo"):
        policy_named("fifoo")


def test_fifo_is_first_come_first_served_to_the_second() -> None:
    """Two jobs of which one fits, computed by hand."""
    cluster = cluster_of(np.full((12, 1, 2), 3.0), (0,))
    first, second = job_of("a", rows=3000.0), job_of("b", rows=1000.0)
    done = replay_jobs(cluster, [first, second], FifoPolicy())
    check_schedule(done)
    step_s = 8 / 2 * 0.1 + 2 * 8.0 / 1 / 10_000.0
    first_s = 3000 / 8 * step_s
    assert done.finished_s["a"] == pytest.approx(first_s)
    assert done.finished_s["b"] == pytest.approx(200 + 1000 / 8 * step_s)
    # 2 GPUs, 2 cores and a core of the server, 0.36 USD an hour each
    seconds = first_s + 1000 / 8 * step_s
    assert done.usd == pytest.approx(5 * 0.36 / 3600 * seconds)


def test_a_job_whose_owner_asks_for_more_than_there_is_runs_all_the_same() -> None:
    for name in ("fifo", "tiresias"):
        done = replay_jobs(
            plain_cluster(), [job_of(most=200, batch=200, wanted=200)], POLICIES[name]()
        )
        check_schedule(done)
        assert set(done.finished_s) == {"a"}, name


def test_tiresias_preempts_jobs_with_much_service() -> None:
    cluster = cluster_of(np.full((60, 1, 2), 3.0), (0,), slot_s=100.0)
    jobs = [job_of("long", rows=60_000.0), job_of("short", arrival=3, rows=800.0)]
    policy = TiresiasPolicy(limits_s=(400.0,), change_s=10.0)
    done = replay_jobs(cluster, jobs, policy)
    check_schedule(done)
    assert done.finished_s["short"] < done.finished_s["long"]
    again = [use for use in done.uses if use.job == "long" and use.lost_s]
    assert [use.lost_s for use in again] == [10.0]


def test_reservations_are_kept_and_rejected_jobs_get_nothing() -> None:
    cluster = cluster_of(np.full((6, 1, 2), 4.0), (0,))
    late = {"urgency": 5.0, "target": 2.0, "rows": 3500.0}
    jobs = [job_of(f"j{number}", **late) for number in range(6)]  # type: ignore[arg-type]
    done = replay_jobs(cluster, jobs, PdOrsPolicy())
    check_schedule(done)
    admitted = {one.job for one in done.admissions if one.is_admitted}
    assert 0 < len(admitted) < 6
    assert set(done.finished_s) == admitted
    assert all(
        one.surplus is None or (one.surplus > 0) == one.is_admitted for one in done.admissions
    )


def test_spot_machines_that_go_take_no_job_with_them() -> None:
    capacity = np.full((30, 2, 2), 4.0)
    capacity[1:5, 1] = 0.0
    cluster = cluster_of(capacity, (0, 0), spot=(False, True))
    jobs = [job_of(f"j{number}", rows=2000.0, target=20.0) for number in range(4)]
    for name in POLICIES:
        done = replay_jobs(cluster, jobs, POLICIES[name]())
        check_schedule(done)
        admitted = {one.job for one in done.admissions if one.is_admitted} or set(done.jobs)
        assert set(done.finished_s) == admitted, name


def test_policies_do_not_read_future_spot_capacity() -> None:
    capacity = np.full((10, 2, 2), 4.0)
    other = capacity.copy()
    other[4:, 1] = 0.0
    first = {}
    for number, each in enumerate((capacity, other)):
        cluster = cluster_of(each, (0, 0), spot=(False, True))
        done = replay_jobs(cluster, [job_of("a", rows=20_000.0, urgency=0.1)], PdOrsPolicy())
        first[number] = [use.allocation for use in done.uses if use.slot < 4]
    assert first[0] == first[1]


def test_oasis_has_no_site_with_both() -> None:
    cluster = cluster_of(np.full((12, 4, 2), 4.0), (0, 0, 0, 0))
    done = replay_jobs(cluster, [job_of(f"j{n}") for n in range(3)], oasis())
    check_schedule(done)
    assert done.uses
    for use in done.uses:
        workers = {site for site, _ in use.allocation.workers}
        assert not workers & {site for site, _ in use.allocation.servers}


def test_outcomes_are_those_of_a_history_by_hand() -> None:
    cluster = cluster_of(np.full((12, 1, 2), 3.0), (0,))
    done = replay_jobs(cluster, [job_of("a", rows=1000.0, value=10.0)], FifoPolicy())
    outcome = outcome_of(done)
    took_s = 1000 / 8 * (0.4 + 0.0016)
    assert outcome.completion.mean_s == pytest.approx(took_s)
    assert outcome.utility == pytest.approx(5.0)  # urgency 0: half of the worth
    assert outcome.utilisation == pytest.approx(took_s / 100)  # 3 of 3 cores
    assert outcome.fairness == pytest.approx(1.0)
    assert (outcome.ended, outcome.rejected) == (1, 0)


def broken(done: ClusterSchedule, **changes: object) -> ClusterSchedule:
    return replace(done, uses=(replace(done.uses[0], **changes), *done.uses[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allocation": Allocation(((0, 4),), ((0, 2),), 8)}, "exceeds its cpu"),
        ({"allocation": Allocation(((0, 3),), ((1, 1),), 8)}, "parameter servers for"),
        ({"allocation": Allocation(((0, 1),), ((0, 1),), 9)}, "a batch of 9"),
        ({"rows": 1.0}, "where"),
        ({"usd": 5.0}, "USD, where it costs"),
        ({"used_s": 1000.0}, "s used"),
    ],
)
def test_the_validator_bites(changes: dict[str, object], words: str) -> None:
    done = replay_jobs(plain_cluster(), [job_of()], FifoPolicy())
    assert list(violations(done)) == []
    with pytest.raises(InvariantError):
        check_schedule(broken(done, **changes))
    assert any(words in text for text in violations(broken(done, **changes)))


def test_the_validator_checks_data_regions_and_rejected_jobs() -> None:
    cluster = cluster_of(np.full((12, 2, 2), 4.0), (0, 1))
    done = replay_jobs(cluster, [job_of(data={1: 1.0})], FifoPolicy())
    check_schedule(done)
    wrong = broken(done, allocation=Allocation(((0, 2),), ((0, 1),), 8))
    assert any("region without its data" in text for text in violations(wrong))
    assert any("without an end" in text for text in violations(replace(done, finished_s={})))
    early = replace(done, jobs={"a": job_of(data={1: 1.0}, arrival=3)})
    assert any("before its arrival" in text for text in violations(early))
