"""A cluster on a Terraform stack: requests, rejections and status."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from geo_ray.api.clusters import up_offer
from geo_ray.base.errors import ClusterStateError, ConfigError, TerraformOutputsError
from geo_ray.base.load import load_tree, override_items
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.cluster.head import find_head, head_address, job_server_of, tunnel_command
from geo_ray.cloud.cluster.providers import RemoteProvider, secret_command, secrets_of
from geo_ray.cloud.cluster.spec import ClusterSpec, cluster_spec
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState, decode_cluster, encode_cluster
from geo_ray.cloud.cluster.status import HeadStatus, report_of, write_status
from geo_ray.cloud.cluster.up import _made_of
from geo_ray.cloud.provider import Availability, LaunchRequest, Machine, MachineState, Market, Pool
from geo_ray.cloud.terraform import TerraformStack
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.prices.price_book import bundled_book
from geo_ray.runs.planning import Sources, make_plan

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "cluster_local.yaml"
NOW_S = 1_800_000_000.0
AT = {"us": "us-east-1", "eu": "eu-central-1", "asia": "ap-northeast-1"}
BUCKET = "s3://demo-runs/clusters?region=us-east-1"


def tree(**changes: Any) -> dict[str, Any]:
    """Return the outputs of a stack."""
    held: dict[str, Any] = {
        "version": 1,
        "stack": "demo",
        "cluster": "demo-c",
        "head": {
            "region": "us",
            "address": "10.20.128.10:6380",
            "machine": "i-0head",
            "type": "m5.large",
        },
        "secrets": {
            "aws": {"store": "aws-ssm", "region": "eu-central-1", "token": "geo-ray/demo/token"}
        },
        "runs": "s3://demo-runs/runs?region=us-east-1",
        "clusters": BUCKET,
        "places": {
            name: {
                "cloud": "aws",
                "at": at,
                "machines": [{"type": "m5.2xlarge", "cap": 2}],
                "aws": {"image_id": f"ami-0{name}", "security_group_ids": [f"sg-{name}"]},
            }
            for name, at in AT.items()
        },
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        at = held
        for step in way:
            at = at[step]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return held


def stack(**changes: Any) -> TerraformStack:
    return TerraformStack.model_validate_json(json.dumps(tree(**changes)))


def experiment(**changes: Any) -> Experiment:
    return load_tree(CONFIG, override_items(changes), Experiment)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(experiment(), CONFIG.parent, "optimal", Sources()).plan


def asked(
    plan: Plan, on: TerraformStack | None = None, section: dict[str, Any] | None = None
) -> ClusterSpec:
    found = experiment(**({} if section is None else {"provider": section}))
    return cluster_spec(found, plan, bundled_book(), None, NOW_S, on or stack())


def test_what_the_stack_says_is_the_clusters(plan: Plan) -> None:
    found = asked(plan)
    record = found.record
    assert (record.name, found.state.name, record.run.name) == ("demo-c", "demo-c", "cluster_local")
    assert found.state.uri == "s3://demo-runs/clusters/demo-c?region=us-east-1"
    assert record.clouds == ("aws",)
    aws = record.provider.aws
    assert aws is not None and aws.join is not None
    assert {at: place.image_id for at, place in aws.places.items()} == {
        at: f"ami-0{name}" for name, at in AT.items()
    }
    assert (aws.join.address, aws.join.head) == ("10.20.128.10:6380", None)
    assert aws.secret_store == "aws-ssm"
    assert decode_cluster(encode_cluster(record), "here") == record


def test_its_head_is_neither_rented_nor_ended_and_its_token_is_the_stacks(plan: Plan) -> None:
    found = asked(plan)
    record = found.record
    # A machine that bears the cluster's tag and says it is a head is still none of this cluster's.
    pool = record.head.pool
    machine = Machine("i-9", "r", pool, MachineState.RUNNING, 0.0, "10.0.0.9", {})
    assert find_head([machine], record) is None
    assert head_address(None, record) == "10.20.128.10:6380"
    assert job_server_of("10.20.128.10:6380", record) == "http://127.0.0.1:8265"
    command = tunnel_command("10.20.128.10:6380", record, None)
    assert command is not None and command.startswith("aws ssm start-session --region ")
    assert command.endswith("--parameters portNumber=8265,localPortNumber=8265")
    own = record.model_copy(update={"head": record.head.model_copy(update={"existing": None})})
    assert job_server_of("10.20.128.10:6380", own) == "http://127.0.0.1:8265"
    ssh = "ssh -N -L 8265:127.0.0.1:8265 10.20.128.10"
    assert tunnel_command("10.20.128.10:6380", own, None) == ssh
    assert (pool.region, pool.type, record.head.ends_unix_s) == ("us-east-1", "m5.large", None)
    assert secrets_of(record, found.state) == []
    assert record.token_secret == "geo-ray/demo/token"
    words = secret_command(record).split()
    assert words[-1] == "geo-ray/demo/token"
    assert tuple(words[3:5]) == ("--store", "aws-ssm")
    assert tuple(words[5:7]) == ("--region", "eu-central-1")


def test_how_a_cloud_is_asked_stays_as_configured(plan: Plan) -> None:
    place = {"image_id": "ami-0old", "instance_profile": "old"}
    section = {"aws": {"places": {"us-east-1": place}, "attempts": 2, "timeout_s": 3.0}}
    aws = asked(plan, section=section | {"state": "elsewhere"}).record.provider.aws
    assert aws is not None
    assert (aws.attempts, aws.timeout_s) == (2, 3.0)
    assert (aws.places["us-east-1"].image_id, aws.places["us-east-1"].instance_profile) == (
        "ami-0us",
        None,
    )


@pytest.mark.parametrize(
    ("changes", "says", "fix"),
    [
        ({"clusters": None}, "runs no autoscaler", "rents=true"),
        ({"places__asia": ...}, "asia is not a region of the stack demo", "inventory"),
        ({"places__eu__at": "eu-west-1"}, "has it in eu-west-1 of aws", "Correct"),
        (
            {
                "places__us__pools": {
                    "a": {"type": "t", "market": "spot", "role": "worker", "count": 2}
                }
            },
            "Terraform owns 2 machines of us",
            "without `workers`",
        ),
    ],
    ids=["rents=false", "region", "place", "counts"],
)
def test_what_cannot_be_on_it_is_refused(
    plan: Plan, changes: dict[str, Any], says: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        asked(plan, stack(**changes))
    assert fix in caught.value.fix


def test_pools_without_machines_are_ignored(plan: Plan) -> None:
    none = {"a": {"type": "t", "market": "spot", "role": "worker", "count": 0}}
    assert asked(plan, stack(places__us__pools=none)).record.name == "demo-c"


def test_a_head_in_another_cloud_may_rent_nothing_here(plan: Plan) -> None:
    tencent = {
        "cloud": "tencent",
        "at": "ap-singapore",
        "machines": [],
        "tencent": {"image_id": "img-1", "vpc_id": "vpc-1", "subnets": {"ap-singapore-1": "s"}},
    }
    held = tree(places__sg=tencent, head__region="sg")
    held["secrets"]["tencent"] = {"store": "tencent-ssm", "region": "ap-singapore", "token": "t"}
    on = TerraformStack.model_validate_json(json.dumps(held))
    with pytest.raises(ConfigError, match="in tencent, cannot launch machines"):
        asked(plan, on)


@pytest.mark.parametrize(
    ("provider", "names_stack", "says"),
    [("terraform", False, "no stack is named"), ("aws", True, "a stack of Terraform is named")],
)
def test_the_provider_and_the_stack_go_together(
    tmp_path: Path, provider: str, names_stack: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        up_offer(
            CONFIG, provider=provider, from_terraform=tmp_path / "x.json" if names_stack else None
        )


def test_an_unreadable_stack_is_reported_first(tmp_path: Path) -> None:
    with pytest.raises(TerraformOutputsError, match="cannot be read"):
        up_offer(CONFIG, provider="terraform", from_terraform=tmp_path / "none.json")


def test_the_same_stack_is_the_same_cluster_and_another_one_is_not(plan: Plan) -> None:
    one = asked(plan).record
    assert _made_of(asked(plan).record) == _made_of(one)
    for changes in (
        {"head__address": "10.20.128.11:6379"},
        {"places__eu__aws__image_id": "ami-0new"},
        {"secrets__aws__token": "geo-ray/other/token"},
    ):
        assert _made_of(asked(plan, stack(**changes)).record) != _made_of(one)


# ------------------------------------------------------------------ what is told of it


class Listed:
    """A cloud with a given list of machines."""

    name = "listed"

    def __init__(self, *machines: Machine) -> None:
        self.machines = machines

    def list_machines(self, cluster: str) -> list[Machine]:
        return list(self.machines)

    def launch(self, request: LaunchRequest) -> list[Any]:
        raise AssertionError("nothing is launched")

    def terminate(self, machine_ids: object) -> None:
        raise AssertionError("nothing is ended")

    def poll_failures(self, cluster: str) -> list[Any]:
        return []

    def availability(self, pools: list[Pool]) -> list[Availability]:
        raise AssertionError("the price of Terraform's head is nobody's question")


def written(found: ClusterSpec, where: Path) -> tuple[ClusterRecord, ClusterState]:
    """Write the record to a directory instead of the bucket."""
    state = ClusterState.at(str(where / "demo-c"))
    state.make()
    state.write(found.record, None)
    return found.record, state


def test_the_report_counts_no_head_and_says_whose_it_is(plan: Plan, tmp_path: Path) -> None:
    record, state = written(asked(plan), tmp_path)
    pool = Pool("eu-central-1", None, "m5.2xlarge", Market.SPOT)
    machine = Machine("i-1", "as-1", pool, MachineState.RUNNING, time.time(), "10.0.0.9", {})
    report = report_of(record, state, Listed(machine))  # type: ignore[arg-type]
    assert (report.head, report.address) == (None, "10.20.128.10:6380")
    assert [row.id for row in report.machines] == ["i-1"]
    (note,) = report.notes
    assert "the head i-0head belongs to the Terraform stack demo" in note
    long_ago = HeadStatus(unix_s=time.time() - 3600, made=1, status=AutoscalerStatus(True))
    write_status(state.store(), long_ago, None)
    notes = report_of(record, state, Listed(machine)).notes  # type: ignore[arg-type]
    assert any("is the head running?" in each for each in notes)


def test_an_autoscaler_rents_for_its_own_cluster_only(plan: Plan, tmp_path: Path) -> None:
    record, state = written(asked(plan), tmp_path)
    assert record.target.head is None, "Terraform's head is not in the bill"
    pool = record.target.pools()[0]
    request = LaunchRequest("as-1", record.name, pool, 1, {})
    for changes in ({"phase": "ending"}, {"phase": "down"}, {"made": 2}):
        _, tag = state.read()
        state.write(record.model_copy(update=changes), tag)
        with pytest.raises(ClusterStateError, match="no machines are launched"):
            RemoteProvider(state, record.made).launch(request)
