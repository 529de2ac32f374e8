"""`geo-ray probe CONFIG.yaml` on the shared cluster: every link between three regions."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.api.probe import probe
from geo_ray.base.errors import ConfigError, DeadlineExceededError
from geo_ray.runtime.probe import ProbeStatus, probe_cluster
from geo_ray.transport.links import load_links
from geo_ray.transport.probe.plan import ProbePlan
from tests.support.train_support import experiment_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

REGIONS = ["us-east", "eu-west", "ap-south"]
PLAN = ProbePlan(duration_s=0.5, ramp_s=0.2, pings=5, udp_s=0.2)


def regions(*names: str) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


@pytest.mark.slow
def test_every_link_is_in_the_table(tmp_path: Path) -> None:
    slow = {"src": "us-east", "dst": "eu-west", "rate_mbps": 4.0, "delay_s": 0.01}
    other = {"src": "eu-west", "dst": "us-east", "rate_mbps": 40.0, "delay_s": 0.01}
    experiment = experiment_of(
        tmp_path, regions=regions(*REGIONS), emulate={"links": [slow, other]}
    )
    seen: list[ProbeStatus] = []
    phases: list[str] = []
    found = probe_cluster(experiment, PLAN, seen.append, phases.append, disjoint=True)
    assert not found.failures and found.table.holes(REGIONS) == []
    # sanity only: the machine may be busy
    assert 2 <= found.table.get("us-east", "eu-west").goodput_mbps <= 8
    assert 20 <= found.table.get("eu-west", "us-east").goodput_mbps <= 80
    assert found.table.get("us-east", "eu-west").rtt_s >= 0.02
    assert found.table.get("us-east", "eu-west").loss is None  # no packets pass the emulation
    assert found.table.get("us-east", "ap-south").loss is not None
    assert seen[-1].done == seen[-1].total == 6
    assert any(status.now for status in seen) and len(phases) == 3


@pytest.mark.slow
def test_links_that_fail_are_holes_with_a_reason(tmp_path: Path) -> None:
    far = {"src": "us-east", "dst": "eu-west", "delay_s": 3.0}
    experiment = experiment_of(
        tmp_path,
        regions=regions(*REGIONS),
        emulate={"links": [far]},
        transport={"handshake_timeout_s": 60.0, "peer_timeout_s": 60.0},
    )
    impatient = PLAN.model_copy(update={"udp_s": 0.0, "timeout_s": 2.5})
    found = probe_cluster(experiment, impatient, lambda _: None, lambda _: None)
    assert {("us-east", "eu-west"), ("eu-west", "us-east")} <= set(found.failures)
    for error in found.failures.values():
        assert isinstance(error, DeadlineExceededError)
    assert sorted(found.failures) == found.table.holes(REGIONS)


@pytest.mark.slow
def test_the_library_probes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = {"rate_mbps": 20.0, "delay_s": 0.01}
    experiment = experiment_of(tmp_path, emulate={"link": link})
    quick = PLAN.model_copy(update={"duration_s": 0.2, "udp_s": 0.0})
    found = probe(experiment, how=quick)
    assert repr(found) == "<Probe: 2 links, 0 not measured>" and not found.failures
    rows = found.table().to_pylist()
    assert {(row["src"], row["dst"]) for row in rows} == {
        ("us-east", "eu-west"),
        ("eu-west", "us-east"),
    }
    assert min(row["rtt_s"] for row in rows) >= 0.02
    assert max(row["goodput_mbps"] for row in rows) < 60  # sanity only: it is emulated
    assert load_links(found.save(tmp_path / "links.json")) == found.links
    assert capsys.readouterr() == ("", "")


def test_one_region_has_no_link(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, regions=regions("us-east"))
    with pytest.raises(ConfigError, match="only one region"):
        probe_cluster(experiment, PLAN, lambda _: None, lambda _: None)
