"""What a policy of a cloud's role allows, as far as the policies here have words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

Statement = Mapping[str, Any]


def statements(document: Mapping[str, Any]) -> list[Statement]:
    """Statements of AWS or Tencent Cloud, keys in small letters."""
    by_key = {key.lower(): value for key, value in document.items()}
    found = by_key["statement"]
    return [
        {key.lower(): value for key, value in each.items()}
        for each in (found if isinstance(found, list) else [found])
    ]


def allows(document: Mapping[str, Any], action: str, resource: str, **context: str) -> bool:
    """Whether a role with this policy alone may do something.

    Args:
        document: the policy.
        action: such as ``s3:GetObject``.
        resource: on what.
        **context: what conditions look at, by the condition's key, ``:`` and ``/`` as ``_``.
    """
    fitting = [
        each
        for each in statements(document)
        if _any(each["action"], action)
        and _any(each["resource"], resource)
        and _holds(each.get("condition") or {}, context)
    ]
    effects = {each["effect"].lower() for each in fitting}
    assert effects <= {"allow", "deny"}
    return effects == {"allow"}


def _any(patterns: str | Sequence[str], text: str) -> bool:
    many = [patterns] if isinstance(patterns, str) else patterns
    # Brackets stand for themselves in a cloud's patterns.
    return any(fnmatchcase(text, each.replace("[", "[[]")) for each in many)


def _holds(condition: Mapping[str, Mapping[str, Any]], context: Mapping[str, str]) -> bool:
    for operator, wanted in condition.items():
        for key, values in wanted.items():
            found = context.get(key.translate(str.maketrans(":/-", "___")))
            many = [values] if isinstance(values, str) else values
            match operator:
                case "StringEquals" | "for_any_value:string_equal":
                    holds = found in many
                case "StringLike":
                    holds = found is not None and _any(many, found)
                case "Null":
                    holds = (found is None) == ("true" in many)
                case "Bool":
                    holds = found in many
                case _:
                    raise AssertionError(f"a condition that nobody here can judge: {operator}")
            if not holds:
                return False
    return True


# ------------------------------------------------------------------ what nodes and heads may do

BUCKET = "arn:aws:s3:::demo-runs"
RUN = f"{BUCKET}/runs/my_job"
RECORDS = [
    f"{BUCKET}/clusters/demo/{name}/00000000000000000001"
    for name in ("cluster.json", "autoscaler.z", "lease.json", "status.json", "making/lease.json")
]
RUN_RECORDS = [
    f"{RUN}/begun",
    f"{RUN}/lease.json/00000000000000000001",
    f"{RUN}/events/1-0-1-a.jsonl",
    f"{RUN}/files/000001-00000001-a/config.lock.yaml",
    f"{RUN}/requests/stop",
    f"{RUN}/checkpoints/ckpt-00000001/manifest.json",
    f"{RUN}/checkpoints/ckpt-00000001/claim",
]
OWN_PARTS = [
    f"{RUN}/checkpoints/ckpt-00000001/eu-ps0.safetensors",
    f"{RUN}/checkpoints/ckpt-00000001/averager.safetensors",
    f"{RUN}/checkpoints/model/model-eu.safetensors",
]
OTHERS_PARTS = [
    f"{RUN}/checkpoints/ckpt-00000001/us-ps0.safetensors",
    f"{RUN}/checkpoints/ckpt-00000001/eu-ps-ps0.safetensors",
    f"{RUN}/checkpoints/model/model-us.safetensors",
    f"{RUN}/data/eu/train/0.npz",
]


def check_aws_nodes(policy: Mapping[str, Any], token: str, other_secret: str) -> None:
    """A node of the region eu reads what it needs, and writes its own parts alone."""
    assert allows(policy, "secretsmanager:GetSecretValue", token)
    assert not allows(policy, "secretsmanager:GetSecretValue", other_secret)
    assert not allows(policy, "secretsmanager:PutSecretValue", token)
    making, once = {"s3_ObjectCreationOperation": "true"}, {"s3_if_none_match": "*"}
    for key in OWN_PARTS:
        assert allows(policy, "s3:PutObject", key, **making, **once), key
        assert not allows(policy, "s3:PutObject", key, **making), f"{key} can be replaced"
        assert allows(policy, "s3:PutObject", key, s3_ObjectCreationOperation="false"), "a piece"
        assert allows(policy, "s3:GetObject", key), key
    for key in OTHERS_PARTS + RUN_RECORDS + RECORDS:
        assert not allows(policy, "s3:PutObject", key, **making, **once), key
    for key in OWN_PARTS + OTHERS_PARTS + RUN_RECORDS + RECORDS:
        assert not allows(policy, "s3:DeleteObject", key), key
    assert allows(policy, "s3:GetObject", f"{RUN}/data/eu/train/0.npz")
    for key in (f"{RUN}/data/us/train/0.npz", *RECORDS, f"{RUN}/lease.json/1"):
        assert not allows(policy, "s3:GetObject", key), key
    assert allows(policy, "s3:ListBucket", BUCKET, s3_prefix="runs/my_job/checkpoints/")
    assert not allows(policy, "s3:ListBucket", BUCKET, s3_prefix="clusters/demo/")
    assert not allows(policy, "s3:ListBucket", BUCKET)
    for action in ("ec2:RunInstances", "ec2:TerminateInstances", "iam:PassRole", "ec2:CreateTags"):
        tags = {"aws_RequestTag_geo_ray_cluster": "demo", "aws_ResourceTag_geo_ray_cluster": "demo"}
        assert not allows(policy, action, "arn:aws:ec2:us-east-1:123456789012:instance/i-1", **tags)


def check_aws_head(policy: Mapping[str, Any], token: str, nodes_role: str) -> None:
    """A head keeps the records, and rents and ends machines of its own cluster alone."""
    assert allows(policy, "secretsmanager:GetSecretValue", token)
    for key in OWN_PARTS + OTHERS_PARTS + RUN_RECORDS + RECORDS:
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert allows(policy, action, key), (action, key)
    for prefix in ("clusters/demo/cluster.json/", "runs/my_job/"):
        assert allows(policy, "s3:ListBucket", BUCKET, s3_prefix=prefix)
    instance = "arn:aws:ec2:eu-central-1:123456789012:instance/i-1"
    for cluster, may in (("demo", True), ("other", False)):
        asked = {"aws_RequestTag_geo_ray_cluster": cluster}
        borne = {"aws_ResourceTag_geo_ray_cluster": cluster}
        assert allows(policy, "ec2:RunInstances", instance, **asked) == may
        assert allows(policy, "ec2:TerminateInstances", instance, **borne) == may
    assert not allows(policy, "ec2:TerminateInstances", instance)
    assert allows(policy, "ec2:RunInstances", "arn:aws:ec2:us-east-1::image/ami-1")
    for action in ("ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory", "pricing:GetProducts"):
        assert allows(policy, action, "*")
    to = {"iam_PassedToService": "ec2.amazonaws.com"}
    assert allows(policy, "iam:PassRole", nodes_role, **to)
    assert not allows(policy, "iam:PassRole", "arn:aws:iam::123456789012:role/admin", **to)
    made = {"ec2_CreateAction": "RunInstances"}
    for cluster, may in (("demo", True), ("other", False)):
        asked = {"aws_RequestTag_geo_ray_cluster": cluster}
        assert allows(policy, "ec2:CreateTags", instance, **made, **asked) == may
    assert not allows(policy, "ec2:CreateTags", instance)


def check_tencent_nodes(policy: Mapping[str, Any], token: str, keys: str) -> None:
    """A node reads what it needs to join, and neither rents nor reads the records' keys."""
    for action in ("ssm:ListSecretVersionIds", "ssm:GetSecretValue"):
        assert allows(policy, action, token)
        assert not allows(policy, action, keys)
    assert not allows(policy, "ssm:PutSecretValue", token)
    for action in ("cvm:RunInstances", "cvm:TerminateInstances", "cam:PassRole"):
        tags = dict.fromkeys(("qcs_request_tag", "qcs_resource_tag"), "geo-ray:cluster&demo")
        assert not allows(policy, action, "*", **tags)


def check_tencent_head(policy: Mapping[str, Any], token: str, nodes_role: str) -> None:
    """A head rents and ends machines of its own cluster alone."""
    assert allows(policy, "ssm:GetSecretValue", token)
    for cluster, may in (("demo", True), ("other", False)):
        tag = f"geo-ray:cluster&{cluster}"
        assert allows(policy, "cvm:RunInstances", "*", qcs_request_tag=tag) == may
        assert allows(policy, "tag:TagResources", "*", qcs_request_tag=tag) == may
        assert allows(policy, "cvm:TerminateInstances", "*", qcs_resource_tag=tag) == may
    for action in ("cvm:DescribeInstances", "cvm:DescribeZoneInstanceConfigInfos"):
        assert allows(policy, action, "*")
    assert allows(policy, "cam:PassRole", nodes_role)
    assert not allows(policy, "cam:PassRole", f"{nodes_role.rpartition('/')[0]}/admin")
