"""The examples of AWS, planned, applied, inspected, changed and destroyed against a moto server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.api.clusters import up_offer
from geo_ray.base.errors import ConfigError
from geo_ray.cli.main import root
from geo_ray.cloud.aws import AwsProvider
from geo_ray.cloud.boot_script import boot_script
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.provider import LaunchRequest, MachineState, Market, Pool
from geo_ray.cloud.secrets import open_secrets
from geo_ray.cloud.terraform import TerraformStack, aws_config, read_stack
from geo_ray.planner.plan import load_plan
from geo_ray.storage.uri import parse_s3
from tests.support.cloud_servers import AwsAnswers, LoopbackCloud, instance_product
from tests.support.cluster_support import RUN, machine_of, played_head
from tests.support.ec2_frontend import Ec2Frontend
from tests.support.policy_support import allows
from tests.support.terraform_support import (
    ROOT,
    Terraform,
    aws_on_loopback,
    aws_plugins,
    copied,
    terraform_program,
    without_what_moto_forgets,
)

CLUSTER_CIDRS = ("10.20.0.0/16", "10.21.0.0/16", "10.22.0.0/16", "10.23.0.0/16")
PLANNED = {
    "us": {
        "a": {"type": "g5.xlarge", "market": "spot", "role": "worker", "count": 2},
        "b": {"type": "m5.2xlarge", "market": "on_demand", "role": "server", "count": 1},
    },
    "eu": {"a": {"type": "g5.xlarge", "market": "on_demand", "role": "worker", "count": 1}},
}
AT = {"us": "us-east-1", "eu": "eu-central-1"}
APPLY = ("apply", "-auto-approve", "-input=false", "-no-color")


class Account:
    """Resources that exist in the account."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.endpoint = environment["AWS_ENDPOINT_URL"]

    def client(self, service: str, region: str = "us-east-1") -> Any:
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.endpoint,
            aws_access_key_id=self._environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self._environment["AWS_SECRET_ACCESS_KEY"],
        )

    def image(self, region: str) -> str:
        """Create a machine image of the region, as a user of the examples does."""
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20}}
        made = self.client("ec2", region).register_image(
            Name="geo-ray", RootDeviceName="/dev/sda1", BlockDeviceMappings=[disk]
        )
        return str(made["ImageId"])

    def instances(self, region: str) -> list[dict[str, Any]]:
        found = self.client("ec2", region).describe_instances()["Reservations"]
        return [
            one for each in found for one in each["Instances"] if one["State"]["Name"] == "running"
        ]

    def left(self, region: str) -> dict[str, list[Any]]:
        """Return all resources that a stack leaves."""
        ec2 = self.client("ec2", region)
        own = {"Filters": [{"Name": "tag:geo-ray:stack", "Values": ["demo"]}]}
        keys = self.client("kms", region)
        return {
            "instances": [one["InstanceId"] for one in self.instances(region)],
            "volumes": ec2.describe_volumes(**own)["Volumes"],
            "networks": ec2.describe_vpcs(**own)["Vpcs"],
            "groups": ec2.describe_security_groups(**own)["SecurityGroups"],
            "addresses": ec2.describe_addresses()["Addresses"],
            "gateways": [
                gateway
                for gateway in ec2.describe_nat_gateways()["NatGateways"]
                if gateway["State"] != "deleted"
            ],
            "templates": ec2.describe_launch_templates()["LaunchTemplates"],
            "pools": self.client("autoscaling", region).describe_auto_scaling_groups()[
                "AutoScalingGroups"
            ],
            "secrets": self.client("secretsmanager", region).list_secrets()["SecretList"],
            "topics": self.client("sns", region).list_topics()["Topics"],
            "alarms": self.client("cloudwatch", region).describe_alarms()["MetricAlarms"],
            "keys": [
                key["Description"]
                for one in keys.list_keys()["Keys"]
                for key in [keys.describe_key(KeyId=one["KeyId"])["KeyMetadata"]]
                if key["Description"].startswith("demo") and key["KeyState"] == "Enabled"
            ],
            "buckets": self.client("s3").list_buckets()["Buckets"],
            "roles": self.client("iam").list_roles()["Roles"],
            "budgets": self.client("budgets")
            .describe_budgets(AccountId="123456789012")
            .get("Budgets", []),
        }


@contextmanager
def stack_of(tmp_path: Path, example: str) -> Iterator[tuple[Terraform, Account]]:
    terraform_program()
    aws_plugins()
    tree = copied(tmp_path)
    without_what_moto_forgets(tree)
    directory = tree / "examples" / example
    with aws_on_loopback() as environment:
        terraform = Terraform(directory, environment)
        terraform.init()
        yield terraform, Account(environment)


def variables(directory: Path, **held: Any) -> str:
    file = directory / "test.tfvars.json"
    file.write_text(json.dumps({"name": "demo", "protected": False, **held}))
    return f"-var-file={file}"


def check_closed(account: Account, region: str) -> None:
    """Check that the cluster's networks accept no outside connections."""
    ec2 = account.client("ec2", region)
    lists = {
        one["PrefixListId"]: {
            entry["Cidr"]
            for entry in ec2.get_managed_prefix_list_entries(PrefixListId=one["PrefixListId"])[
                "Entries"
            ]
        }
        for one in ec2.describe_managed_prefix_lists()["PrefixLists"]
        if one["PrefixListName"].startswith("demo")
    }
    own = [{"Name": "tag:geo-ray:stack", "Values": ["demo"]}]
    groups = ec2.describe_security_groups(Filters=own)["SecurityGroups"]
    assert len(groups) == 3  # nodes, head, and the network's default one
    seen = set()
    for group in groups:
        for rule in ec2.describe_security_group_rules(
            Filters=[{"Name": "group-id", "Values": [group["GroupId"]]}]
        )["SecurityGroupRules"]:
            ports = (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"))
            if rule["IsEgress"]:
                world = rule.get("CidrIpv4") == "0.0.0.0/0" and group["GroupName"] != "default"
                assert not world or ports == ("tcp", 443, 443) or ports[0] == "-1"
                continue
            assert rule.get("CidrIpv4") is None and rule.get("CidrIpv6") is None, rule
            assert lists[rule["PrefixListId"]] <= set(CLUSTER_CIDRS)
            seen.add(ports)
    assert {("tcp", 6379, 6379), ("tcp", 10002, 20999), ("tcp", 32768, 60999)} <= seen
    assert ("udp", 32768, 60999) in seen


def check_buckets(account: Account, count: int) -> None:
    s3 = account.client("s3")
    buckets = [one["Name"] for one in s3.list_buckets()["Buckets"]]
    assert len(buckets) == count
    for name in buckets:
        rules = s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"]
        assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
        assert s3.get_bucket_versioning(Bucket=name)["Status"] == "Enabled"
        closed = s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]
        assert all(closed.values()) and len(closed) == 4
        policy = json.loads(s3.get_bucket_policy(Bucket=name)["Policy"])
        assert {one["Effect"] for one in policy["Statement"]} == {"Deny"}
        tags = {t["Key"]: t["Value"] for t in s3.get_bucket_tagging(Bucket=name)["TagSet"]}
        assert tags["geo-ray:stack"] == "demo"


def check_machines(account: Account, region: str) -> None:
    ec2 = account.client("ec2", region)
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        (data,) = [
            version["LaunchTemplateData"]
            for version in ec2.describe_launch_template_versions(
                LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Default"]
            )["LaunchTemplateVersions"]
        ]
        assert data["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        for kind in data["TagSpecifications"]:
            tags = {tag["Key"]: tag["Value"] for tag in kind["Tags"]}
            assert tags["geo-ray:stack"] == "demo"
            # What bears this tag is the autoscaler's and `geo-ray down`'s to end.
            assert "geo-ray:cluster" not in tags
    own = [{"Name": "tag:geo-ray:stack", "Values": ["demo"]}]
    assert all(one["Encrypted"] for one in ec2.describe_volumes(Filters=own)["Volumes"])


def check_roles(account: Account) -> None:
    """Check that nodes can write only their checkpoint parts, and only the head the records."""
    iam = account.client("iam")

    def policy(kind: str) -> dict[str, Any]:
        found = iam.get_role_policy(RoleName=f"demo-{kind}", PolicyName="geo-ray")
        document: dict[str, Any] = found["PolicyDocument"]
        return document

    (runs,) = [
        each["Name"]
        for each in account.client("s3").list_buckets()["Buckets"]
        if each["Name"].startswith("demo-runs-")
    ]
    record = f"arn:aws:s3:::{runs}/clusters/demo/cluster.json/00000000000000000001"
    part = f"arn:aws:s3:::{runs}/runs/my_job/checkpoints/ckpt-00000001/{{}}-ps0.safetensors"
    for region, other in (("us", "eu"), ("eu", "us")):
        nodes = policy(f"nodes-{region}")
        assert allows(nodes, "s3:PutObject", part.format(region))
        assert not allows(nodes, "s3:PutObject", part.format(other))
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert not allows(nodes, action, record)
            assert allows(policy("head"), action, record)


def counts_of(account: Account, region: str) -> dict[str, int]:
    pools = account.client("autoscaling", region).describe_auto_scaling_groups()
    return {
        next(tag["Value"] for tag in one["Tags"] if tag["Key"] == "Name"): one["DesiredCapacity"]
        for one in pools["AutoScalingGroups"]
    }


@contextmanager
def open_bucket(account: Account, uri: str) -> Iterator[None]:
    """Take the policy off a bucket for a while.

    It denies what comes without TLS, as all does here; of that condition moto knows nothing.
    """
    s3, name = account.client("s3"), parse_s3(uri).bucket
    policy = s3.get_bucket_policy(Bucket=name)["Policy"]
    s3.delete_bucket_policy(Bucket=name)
    yield
    s3.put_bucket_policy(Bucket=name, Policy=policy)


def check_a_cluster_on_it(stack: TerraformStack, account: Account, tmp_path: Path) -> None:
    """`geo-ray up --provider terraform` and `down`, with the head's part played here."""
    regions = {name: stack.places[name].at for name in AT}
    assert regions == AT
    config: dict[str, Any] = RUN | {
        "regions": [{"name": name} for name in regions],
        "averager": {"region": "us"},
        "plan": {
            "regions": {
                name: {
                    "cloud": "aws",
                    "at": at,
                    "rows": 100,
                    "machines": [machine_of("m5.2xlarge")],
                }
                for name, at in regions.items()
            }
        },
    }
    prices = AwsAnswers(products=[instance_product(at, "m5.2xlarge", "0.4") for at in AT.values()])
    with LoopbackCloud(Ec2Frontend(account.endpoint, prices=prices)) as cloud:
        endpoints = {"pricing": cloud.url, "ec2": cloud.url}
        places = {at: {"image_id": "ami-0stale"} for at in regions.values()}
        config["provider"] = {"aws": {"places": places, "endpoints": endpoints}}
        with pytest.raises(ConfigError, match="Terraform owns 3 machines of us"):
            up_offer(config, from_terraform=tmp_path / "terraform/examples/two_regions_aws")

        # As it would be without `workers`.
        held = json.loads(stack.model_dump_json())
        for place in held["places"].values():
            place["pools"] = place["groups"] = {}
        outputs = tmp_path / "outputs.json"
        outputs.write_text(json.dumps(held))
        state = ClusterState.below(stack.clusters or "", stack.cluster)
        user_data = account.client("ec2").describe_instance_attribute(
            InstanceId=stack.head.machine, Attribute="userData"
        )["UserData"]["Value"]
        script = base64.b64decode(user_data).decode()
        assert f"-m geo_ray.cloud.cluster.serve --stays '{state.uri}'" in script

        before = {at: len(account.instances(at)) for at in regions.values()}
        with played_head(state):
            made = geo_ray.up(config, provider="terraform", from_terraform=outputs, longest_s=60.0)
            assert all(
                node_group.ready == node_group.planned == 1
                for node_group in made.report.node_groups
            )
            for name, at in regions.items():
                assert len(account.instances(at)) == before[at] + 1, name
            ended = geo_ray.down(state.uri)
        # Not the one above, which bears the same name and is still listed, but no id of a cluster.
        assert (ended.machines, ended.in_order, ended.stack) == (2, True, "demo")
        assert {at: len(account.instances(at)) for at in regions.values()} == before
        assert stack.head.machine in {one["InstanceId"] for one in account.instances("us-east-1")}


@pytest.mark.slow  # an apply takes a minute
@pytest.mark.timeout(2400)
def test_two_regions_from_nothing_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack_of(tmp_path, "two_regions_aws") as (terraform, account):
        # The provider watches a rule of a bucket's life for a minute; four continents has it.
        bucket = terraform.directory.parents[1] / "modules" / "aws" / "bucket"
        life = 'resource "aws_s3_bucket_lifecycle_configuration" "this" {\n  count = 0\n}\n'
        (bucket / "test_override.tf").write_text(life)
        images = {"us": account.image("us-east-1"), "eu": account.image("eu-central-1")}
        file = variables(
            terraform.directory, image_ids=images, workers=PLANNED, emails=["a@example.com"]
        )
        terraform.run(*APPLY, file)

        # -------- what is there
        for region in ("us-east-1", "eu-central-1"):
            check_closed(account, region)
            check_machines(account, region)
        check_buckets(account, 3)
        us = {"demo-us a": 2, "demo-us b": 1}
        assert counts_of(account, "us-east-1") == us
        assert counts_of(account, "eu-central-1") == {"demo-eu a": 1}
        links = account.client("ec2").describe_vpc_peering_connections()["VpcPeeringConnections"]
        assert [one["Status"]["Code"] for one in links] == ["active"]
        for region, other in (("us-east-1", CLUSTER_CIDRS[1]), ("eu-central-1", CLUSTER_CIDRS[0])):
            tables = account.client("ec2", region).describe_route_tables()["RouteTables"]
            ways = [way for table in tables for way in table["Routes"]]
            found = [way for way in ways if way.get("DestinationCidrBlock") == other]
            assert [way["VpcPeeringConnectionId"] for way in found] == [
                links[0]["VpcPeeringConnectionId"]
            ]
        check_roles(account)
        (budget,) = account.client("budgets").describe_budgets(AccountId="123456789012")["Budgets"]
        assert budget["CostFilters"]["TagKeyValue"] == [
            "user:geo-ray:stack$demo",
            "user:geo-ray:cluster$demo",
        ]

        # -------- no secret in the state
        for name, value in terraform.environment.items():
            monkeypatch.setenv(name, value)
        state = (terraform.directory / "terraform.tfstate").read_text()
        token = open_secrets("aws-secretsmanager", "us-east-1").get("geo-ray/demo/token")
        assert len(token) == 64 and token.isalnum()
        assert token not in state

        # -------- what others read of it
        stack = read_stack(terraform.directory)
        assert stack.head.address == "10.20.128.10:6379"
        shown = CliRunner().invoke(
            root, ["inventory", "--from-terraform", str(terraform.directory)]
        )
        assert shown.exit_code == 0, shown.output
        assert "at: eu-central-1" in shown.output

        # -------- the autoscaler owns the counts: machines are rented where Terraform says
        config = aws_config(stack)
        assert config is not None and config.join is not None
        provider = AwsProvider(config)
        pool = Pool("eu-central-1", None, "m5.large", Market.ON_DEMAND)
        request = LaunchRequest("as-1", "demo", pool, 1, {"geo-ray/role": "worker"})
        assert provider.launch(request) == []
        (rented,) = provider.list_machines("demo")
        assert rented.request_id == "as-1" and rented.address is not None
        assert rented.address.startswith("10.21.")
        (one,) = [m for m in account.instances("eu-central-1") if m["InstanceId"] == rented.id]
        assert [g["GroupId"] for g in one["SecurityGroups"]] == list(
            config.places["eu-central-1"].security_group_ids
        )
        provider.terminate([rented.id])
        assert [m.state for m in provider.list_machines("demo")] == [MachineState.ENDED]

        monkeypatch.setattr("geo_ray.cloud.cluster.state._REMOTE_POLL_S", 0.3)
        with open_bucket(account, stack.runs):
            check_a_cluster_on_it(stack, account, tmp_path)

        # -------- Terraform owns the counts: a node of a pool boots as a rented one would
        template = next(
            one
            for one in account.client("ec2").describe_launch_templates()["LaunchTemplates"]
            if one["LaunchTemplateName"].startswith("demo-us-a-")
        )
        (version,) = account.client("ec2").describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Default"]
        )["LaunchTemplateVersions"]
        labels = {
            "geo-ray/role": "worker",
            "ray.io/availability-region": "us",
            "ray.io/market-type": "spot",
            "ray.io/node-group": "g5.xlarge",
        }
        asked = LaunchRequest("x", "demo", Pool("us-east-1", None, "x", Market.SPOT), 1, labels)
        script = boot_script(asked, config.join, "aws", config.secret_store)
        assert base64.b64decode(version["LaunchTemplateData"]["UserData"]).decode() == script

        # -------- changed: another plan's counts, one pool gone
        monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
        planned = CliRunner().invoke(
            root,
            [
                "plan",
                str(ROOT / "configs" / "planned.yaml"),
                "--set=task.options={size: 0.1M}",
                f"--out-tfvars={tmp_path / 'w.json'}",
                f"--out={tmp_path / 'p.json'}",
            ],
        )
        assert planned.exit_code == 0, planned.output
        workers = json.loads((tmp_path / "w.json").read_text())["workers"]
        plan = load_plan(tmp_path / "p.json")
        assert set(workers) == {region.region for region in plan.regions}
        del workers["asia"]  # not of this example
        offered = {
            name: [{"type": p["type"], "cap": 9} for p in pools.values() if p["role"] == "worker"]
            for name, pools in workers.items()
        }
        file = variables(terraform.directory, image_ids=images, workers=workers, machines=offered)
        terraform.run(*APPLY, file)
        for region, at in (("us", "us-east-1"), ("eu", "eu-central-1")):
            assert counts_of(account, at) == {
                f"demo-{region} {name}": pool["count"] for name, pool in workers[region].items()
            }
        assert account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        after = json.loads((terraform.directory / "terraform.tfstate").read_text())
        again = open_secrets("aws-secretsmanager", "us-east-1").get("geo-ray/demo/token")
        assert again == token, "an apply must not make another token"
        assert after["outputs"]["geo_ray"]["value"]["places"]["us"]["pools"] == workers["us"]

        # -------- destroyed
        terraform.run("destroy", *APPLY[1:], file)
        for region in ("us-east-1", "eu-central-1"):
            assert {k: v for k, v in account.left(region).items() if v} == {}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_four_continents_are_a_full_mesh(tmp_path: Path) -> None:
    regions = {"us": "us-east-1", "eu": "eu-central-1", "asia": "ap-northeast-1", "sa": "sa-east-1"}
    with stack_of(tmp_path, "four_continents_aws") as (terraform, account):
        images = {name: account.image(at) for name, at in regions.items()}
        file = variables(terraform.directory, image_ids=images, nat=False)
        terraform.run(*APPLY, file)
        check_buckets(account, 5)
        s3 = account.client("s3")
        for bucket in s3.list_buckets()["Buckets"]:
            (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket["Name"])["Rules"]
            assert rule["Status"] == "Enabled"
            assert rule["NoncurrentVersionExpiration"]["NoncurrentDays"] == 30
        for at in regions.values():
            tables = account.client("ec2", at).describe_route_tables()["RouteTables"]
            ways = [way for table in tables for way in table["Routes"]]
            linked = {w["DestinationCidrBlock"] for w in ways if w.get("VpcPeeringConnectionId")}
            assert len(linked) == 3 and linked < set(CLUSTER_CIDRS)
            assert not [way for way in ways if way.get("DestinationCidrBlock") == "0.0.0.0/0"]
        stack = read_stack(terraform.directory)
        assert set(stack.places) == set(regions)
        terraform.run("destroy", *APPLY[1:], file)
        for at in regions.values():
            assert {k: v for k, v in account.left(at).items() if v} == {}
