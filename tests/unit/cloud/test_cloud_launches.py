"""Requests to AWS and Tencent Cloud, and the timers that end abandoned machines."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import ProviderRefusedError, ProviderUnreachableError
from geo_ray.cloud.boot_script import boot_script
from geo_ray.cloud.provider import (
    HEAD_ROLE,
    ROLE_LABEL,
    LaunchFailureKind,
    LaunchRequest,
    MachineProvider,
    MachineState,
    MachineTags,
    Market,
    Pool,
    read_tags,
    tags_of,
)
from geo_ray.experiment.provider import (
    AwsPlaceConfig,
    AwsProviderConfig,
    HeadBoot,
    NodeJoin,
    TencentPlaceConfig,
)
from tests.support.cloud_servers import as_caller, shows_no_secret
from tests.support.provider_support import CLUSTER, JOIN, CloudBench, aws_bench, tencent_bench


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBench]:
    as_caller(monkeypatch, tmp_path)
    with aws_bench(tmp_path) as bench:
        yield bench


@pytest.fixture
def tencent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBench]:
    as_caller(monkeypatch, tmp_path)
    with tencent_bench(tmp_path) as bench:
        yield bench


def test_aws_machines_are_encrypted_tagged_and_end_at_shutdown(aws: CloudBench) -> None:
    aws.provider.launch(aws.request("spot", aws.spot, count=1))
    (asked,) = aws.server.launches
    assert asked["ClientToken"] == "spot"
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["BlockDeviceMapping.1.Ebs.Encrypted"] == "true"
    assert asked["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert asked["MetadataOptions.HttpTokens"] == "required"
    assert asked["InstanceMarketOptions.MarketType"] == "spot"
    assert asked["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    kinds = {asked[f"TagSpecification.{n}.ResourceType"] for n in (1, 2)}
    assert kinds == {"instance", "volume"}  # a volume that is left behind can be found, too
    script = base64.b64decode(asked["UserData"]).decode()
    assert "shutdown -P" in script and "geo-ray/token" in script and shows_no_secret(script)


def test_a_place_says_network_role_and_key(tmp_path: Path) -> None:
    from geo_ray.cloud.aws import _run_instances

    place = AwsPlaceConfig(
        image_id="ami-1",
        subnets={"us-east-1a": "subnet-a", "us-east-1b": "subnet-b"},
        security_group_ids=("sg-1",),
        instance_profile="geo-ray-node",
        kms_key_id="key-1",
    )
    wanted = request("r", Pool("us-east-1", "us-east-1b", "m5.large", Market.ON_DEMAND))
    asked = _run_instances(wanted, place, "#!")
    assert asked["SubnetId"] == "subnet-b" and asked["SecurityGroupIds"] == ["sg-1"]
    assert asked["IamInstanceProfile"] == {"Name": "geo-ray-node"}
    assert asked["BlockDeviceMappings"][0]["Ebs"]["KmsKeyId"] == "key-1"
    anywhere = replace(wanted, pool=replace(wanted.pool, zone=None))
    assert _run_instances(anywhere, place, "#!") == _run_instances(anywhere, place, "#!")
    with pytest.raises(ProviderRefusedError, match="us-east-1z"):
        _run_instances(replace(wanted, pool=replace(wanted.pool, zone="us-east-1z")), place, "#!")


@pytest.mark.parametrize(
    ("role", "head_profile", "gets"),
    [
        ("head", "geo-ray-head", "geo-ray-head"),
        ("worker", "geo-ray-head", "geo-ray-node"),
        ("head", None, "geo-ray-node"),
    ],
)
def test_the_head_has_a_role_of_its_own(role: str, head_profile: str | None, gets: str) -> None:
    from geo_ray.cloud import aws as of_aws
    from geo_ray.cloud import tencent as of_tencent

    pool = Pool("us-east-1", None, "m5.large", Market.ON_DEMAND)
    wanted = replace(request("r", pool), labels={"geo-ray/role": role})
    aws = AwsPlaceConfig(
        image_id="ami-1", instance_profile="geo-ray-node", head_profile=head_profile
    )
    asked = of_aws._run_instances(wanted, aws, "#!")
    assert asked["IamInstanceProfile"] == {"Name": gets}
    tencent = TencentPlaceConfig(
        image_id="img-1",
        vpc_id="vpc-1",
        subnets={"z-1": "s-1"},
        role="geo-ray-node",
        head_role=head_profile,
    )
    assert of_tencent._run_instances(wanted, tencent, "#!")["CamRoleName"] == gets


def test_the_action_timer_of_tencent_ends_abandoned_machines(tencent: CloudBench) -> None:
    tencent.provider.launch(tencent.request("timer"))
    machines = tencent.until("timer", count=2, state=MachineState.RUNNING)
    tencent.server.ahead_s = 3500
    assert len(tencent.living()) == 2
    tencent.server.ahead_s = 3700
    tencent.until_gone(*(m.id for m in machines))


def test_a_machine_that_fails_late_is_polled(tencent: CloudBench) -> None:
    tencent.server.fail_late = "ResourceInsufficient.CloudDiskSoldOut"
    assert list(tencent.provider.launch(tencent.request("late"))) == []
    tencent.until("late", count=1, state=MachineState.RUNNING)
    (failed,) = tencent.provider.poll_failures(CLUSTER)
    assert (failed.request_id, failed.missing) == ("late", 1)
    assert failed.kind is LaunchFailureKind.SOLD_OUT
    assert failed.machine_id not in (None, *(machine.id for machine in tencent.living()))
    assert tencent.other.poll_failures(CLUSTER)  # a reader that died took nothing with it


def test_machines_of_both_markets_end_in_one_call(tencent: CloudBench) -> None:
    tencent.provider.launch(tencent.request("paid", count=7))  # more than a filter's values
    tencent.provider.launch(tencent.request("spot", tencent.spot, count=1))
    tencent.until("paid", "spot", count=8, state=MachineState.RUNNING)
    ids = [m.id for m in tencent.living()]
    tencent.provider.terminate([*ids, tencent.unknown_id])
    tencent.until_gone(*ids)


def test_a_sold_out_type_is_known_before_a_request(tencent: CloudBench) -> None:
    (sold, good) = tencent.provider.availability([tencent.sold_out, tencent.good])
    assert sold.available == 0 and good.available is None
    assert good.usd_per_hour == pytest.approx(8.0 * 0.14)


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_wrong_credentials_are_reported_without_their_values(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: CloudBench = request.getfixturevalue(cloud)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other-secret")
    monkeypatch.setenv("TENCENTCLOUD_SECRET_KEY", "other-secret")
    provider = type(bench.provider)(bench.provider._config)  # type: ignore[attr-defined,call-arg]
    with pytest.raises(ProviderRefusedError) as refused:
        provider.launch(bench.request("wrong"))
    assert "credentials" in str(refused.value.fix) and "clock" in str(refused.value.fix)
    assert "missing" not in str(refused.value)
    assert "AuthFailure" in str(refused.value) and shows_no_secret(str(refused.value))
    assert "other-secret" not in str(refused.value)


def impatient(bench: CloudBench, **more: object) -> MachineProvider:
    """Return a provider of the same account with other timeouts or calls."""
    kept: Any = bench.provider
    provider: MachineProvider = type(kept)(kept._config.model_copy(update=more))
    return provider


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_an_answer_that_comes_too_late_is_asked_for_again(
    cloud: str, request: pytest.FixtureRequest
) -> None:
    bench: CloudBench = request.getfixturevalue(cloud)
    wanted = bench.request("late")
    bench.server.late_s = 1.5
    with pytest.raises(ProviderUnreachableError):
        impatient(bench, timeout_s=0.5).launch(wanted)
    assert list(bench.provider.launch(wanted)) == []
    bench.until("late", count=2, state=MachineState.RUNNING)
    assert len(bench.living()) == 2


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_what_a_client_repeats_by_itself_makes_machines_once(
    cloud: str, request: pytest.FixtureRequest
) -> None:
    bench: CloudBench = request.getfixturevalue(cloud)
    bench.server.lose = 1
    assert list(impatient(bench, attempts=3).launch(bench.request("again"))) == []
    bench.until("again", count=2, state=MachineState.RUNNING)
    assert len(bench.living()) == 2


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_an_unconfigured_region_is_rejected(cloud: str, request: pytest.FixtureRequest) -> None:
    bench: CloudBench = request.getfixturevalue(cloud)
    with pytest.raises(ProviderRefusedError, match="mars"):
        bench.provider.launch(bench.request("m", replace(bench.good, region="mars", zone=None)))


def test_one_token_for_two_different_requests_is_refused(aws: CloudBench) -> None:
    aws.provider.launch(aws.request("same", count=1))
    with pytest.raises(ProviderRefusedError, match="Idempotent"):
        aws.provider.launch(aws.request("same", aws.sold_out, count=1))


def request(name: str, pool: Pool) -> LaunchRequest:
    labels = {"ray.io/availability-region": "us", "geo-ray/role": "worker"}
    return LaunchRequest(name, CLUSTER, pool, 2, labels, time.time() + 3600)


def test_tags_say_what_a_request_said() -> None:
    wanted = request("r-1", Pool("us", None, "m5.large", Market.SPOT))
    read = read_tags(tags_of(wanted))
    assert (read.cluster, read.request_id, read.labels) == (CLUSTER, "r-1", wanted.labels)
    assert read.ends_unix_s == pytest.approx(wanted.ends_unix_s, abs=1)
    assert read_tags({"geo-ray:ends-unix-s": "tomorrow"}) == MachineTags()


# ------------------------------------------------------------------ user data


STUBS = {
    "shutdown": 'echo "shutdown $@" >> "$LOG"',
    "systemd-run": 'echo "systemd-run $@" >> "$LOG"',
    "useradd": 'echo "useradd $@" >> "$LOG"',
    "chown": 'echo "chown $@" >> "$LOG"',
    "python": """
case "$2" in
  geo_ray.cloud.notices) echo i-0123 ;;
  geo_ray.cloud.secrets) echo "value of ${@: -1}" ;;
  *) exit 9 ;;
esac""",
}


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_the_script_joins_the_cluster_when_a_shell_runs_it(cloud: str, tmp_path: Path) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    join = NodeJoin(
        address="10.0.0.2:6379",
        token_secret="geo-ray/token",
        tls_certificate_secret="geo-ray/certificate",
        tls_key_secret="geo-ray/key",
        tls_ca_secret="geo-ray/ca",
        python=str(tmp_path / "python"),
    )
    wanted = request("r", Pool("north", None, "m5.large", Market.SPOT))
    script = boot_script(wanted, join, cloud, "aws-ssm")  # type: ignore[arg-type]
    assert script == boot_script(wanted, join, cloud, "aws-ssm")  # type: ignore[arg-type]
    assert len(script) < 12000  # both clouds take 16 KB, of which base64 makes a third more
    script = script.replace("/run/geo_ray", str(tmp_path / "run"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log")}
    subprocess.run(["bash", "-c", script], check=True, env=environment)
    off, user, owns, node, agent = (tmp_path / "log").read_text().splitlines()
    assert user.startswith("useradd --system") and user.endswith(" geo-ray")
    assert owns == f"chown -R geo-ray: {tmp_path / 'run'}"
    assert all(" --uid=geo-ray " in unit for unit in (node, agent)), "no job runs as root"
    assert off in ("shutdown -P +59", "shutdown -P +60")
    assert "start --block --address=10.0.0.2:6379" in node
    labels = "geo-ray/role=worker,ray.io/availability-region=us,geo-ray/machine=i-0123"
    assert f"--labels={labels} " in node
    assert f"geo_ray.cloud.agent --cloud {cloud} --machine i-0123" in agent
    told = dict(
        line.split("=", 1) for line in (tmp_path / "run/environment").read_text().splitlines()
    )
    assert told["RAY_USE_TLS"] == "1" and told["RAY_AUTH_MODE"] == "token"
    for name, secret in {"RAY_AUTH_TOKEN_PATH": "token", "RAY_TLS_SERVER_KEY": "key"}.items():
        file = Path(told[name])
        assert file.read_text() == f"value of geo-ray/{secret}\n"
        assert file.stat().st_mode & 0o777 == 0o600


def test_the_head_runs_as_its_own_user_and_listens_for_jobs_on_loopback() -> None:
    labels = {ROLE_LABEL: HEAD_ROLE}
    wanted = replace(request("h", Pool("north", None, "m5.large", Market.ON_DEMAND)), labels=labels)
    join = NodeJoin(head=HeadBoot(state="s3://bucket/clusters/c"), token_secret="t")
    script = boot_script(wanted, join, "aws", "aws-ssm")
    units = [line for line in script.splitlines() if line.startswith("systemd-run")]
    assert len(units) == 2 and all(" --uid=geo-ray " in unit for unit in units)
    assert "--dashboard-host=127.0.0.1" in units[0]
    assert "0.0.0.0" not in script
    assert "chown -R geo-ray: /var/lib/geo_ray" in script


@pytest.mark.parametrize("wrong", ["head", "head:port", "a b:1", "$(id):6379"])
def test_an_address_that_a_shell_could_obey_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="address"):
        NodeJoin(address=wrong, token_secret="t")


def test_labels_are_quoted() -> None:
    wanted = replace(request("r", Pool("n", None, "t", Market.SPOT)), labels={"a": "$(reboot) b"})
    assert "'a=$(reboot) b,'" in boot_script(wanted, JOIN, "aws", "aws-ssm")


def test_a_config_refuses_unknown_keys() -> None:
    with pytest.raises(ValueError, match="image"):
        AwsProviderConfig.model_validate_json(
            '{"places": {"us-east-1": {"image": "ami-1"}}, "join": {}}'
        )
