"""Random clusters, loads and markets: every policy respects every rule and is deterministic."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import ClusterSchedule, violations
from geo_ray.scheduler.workload import LoadShape, generated_cluster, generated_jobs

shapes = st.builds(
    LoadShape,
    machines=st.integers(3, 9),
    jobs=st.integers(1, 8),
    slots=st.integers(3, 12),
    regions=st.integers(1, 3),
    spot_fraction=st.sampled_from([0.0, 0.5]),
)


def replayed(shape: LoadShape, name: str, seed: int) -> ClusterSchedule:
    cluster, jobs = generated_cluster(shape, seed), generated_jobs(shape, seed)
    return replay_jobs(cluster, jobs, POLICIES[name](), seed=seed)


@pytest.mark.parametrize("name", POLICIES)
@given(shape=shapes, seed=st.integers(0, 1000))
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller example takes minutes
)
def test_every_policy_keeps_every_rule(name: str, shape: LoadShape, seed: int) -> None:
    done = replayed(shape, name, seed)
    assert list(violations(done)) == []
    if name != "dorm":  # its solver has a limit of time
        again = replayed(shape, name, seed)
        assert (again.uses, again.finished_s) == (done.uses, done.finished_s)
