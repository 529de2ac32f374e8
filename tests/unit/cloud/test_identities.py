"""Permissions of the roles in the Terraform modules: heads write the records, nodes do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import boto3
import hcl2

from tests.support.policy_support import (
    allows,
    check_aws_head,
    check_aws_nodes,
    check_tencent_head,
    check_tencent_nodes,
)
from tests.support.terraform_support import INFRA, Terraform, aws_on_loopback, copied

TOKEN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:geo-ray/demo/token-Ab1"
OTHER = "arn:aws:secretsmanager:us-east-1:123456789012:secret:other-Ab1"
AWS = """
provider "aws" {
  region = "us-east-1"
}

module "nodes" {
  source = "../modules/aws/identity"

  name         = "demo"
  kind         = "nodes-eu"
  cluster      = "demo"
  secret_arns  = ["%(token)s"]
  kms_key_arns = ["arn:aws:kms:us-east-1:123456789012:key/1"]
  bucket_arns  = ["arn:aws:s3:::demo-eu-data"]
  runs         = { arn = "arn:aws:s3:::demo-runs", region = "eu" }
}

module "head" {
  source = "../modules/aws/identity"

  name             = "demo"
  kind             = "head"
  cluster          = "demo"
  secret_arns      = ["%(token)s"]
  kms_key_arns     = ["arn:aws:kms:us-east-1:123456789012:key/1"]
  bucket_arns      = ["arn:aws:s3:::demo-runs"]
  rents            = true
  passed_role_arns = [module.nodes.role_arn]
}
"""


def test_aws_nodes_write_their_own_parts_and_the_head_the_records(tmp_path: Path) -> None:
    folder = copied(tmp_path) / "identities"
    folder.mkdir()
    (folder / "main.tf").write_text(AWS % {"token": TOKEN})
    with aws_on_loopback() as environment:
        terraform = Terraform(folder, environment)
        terraform.init()
        terraform.run("apply", "-auto-approve", "-input=false", "-no-color")
        iam = boto3.client(
            "iam",
            region_name="us-east-1",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        )

        def policy(kind: str) -> dict[str, Any]:
            found = iam.get_role_policy(RoleName=f"demo-{kind}", PolicyName="geo-ray")
            document: dict[str, Any] = found["PolicyDocument"]
            return document

        nodes, head = policy("nodes-eu"), policy("head")
        role = iam.get_role(RoleName="demo-nodes-eu")["Role"]["Arn"]
    check_aws_nodes(nodes, TOKEN, OTHER)
    check_aws_head(head, TOKEN, role)
    for kind in ("subnet", "security-group"):
        there = f"arn:aws:ec2:us-east-1:123456789012:{kind}/x"
        for stack, may in (("demo", True), ("other", False)):
            tags = {"aws_ResourceTag_geo_ray_stack": stack}
            assert allows(head, "ec2:RunInstances", there, **tags) == may
        assert not allows(head, "ec2:RunInstances", there)
    for action in ("s3:GetObject", "s3:PutObject"):
        assert allows(nodes, action, "arn:aws:s3:::demo-eu-data/rows/0.parquet")
        assert not allows(nodes, action, "arn:aws:s3:::demo-us-data/rows/0.parquet")


def test_nodes_of_a_region_are_given_no_bucket_but_their_own() -> None:
    with (INFRA / "modules" / "aws" / "region" / "main.tf").open() as file:
        modules = hcl2.load(file)["module"]
    (identity,) = [body for each in modules for name, body in each.items() if "identity" in name]
    assert identity["bucket_arns"] == ["${module.data.arn}"]
    assert "var.runs.arn" in str(identity["runs"])


TENCENT = """
locals {
  owner = "100000000001"
  app   = 1250000000
}

output "policy" {
  value = jsonencode(local.policy)
}
"""


def tencent_policy(tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Return the policy as evaluated by Terraform, without its provider."""
    folder = tmp_path / given["kind"]
    folder.mkdir()
    for name in ("policy.tf", "variables.tf"):
        shutil.copy(INFRA / "modules" / "tencent" / "identity" / name, folder)
    (folder / "main.tf").write_text(TENCENT)
    file = folder / "given.tfvars.json"
    file.write_text(json.dumps({"name": "demo", "cluster": "demo", "tags": {}, **given}))
    terraform = Terraform(folder)
    terraform.init(providers=False)
    terraform.run("apply", "-auto-approve", "-input=false", "-no-color", f"-var-file={file}")
    found: dict[str, Any] = json.loads(terraform.json("output", "-json")["policy"]["value"])
    return found


def test_tencents_nodes_neither_rent_nor_read_the_keys_of_the_records(tmp_path: Path) -> None:
    def secret(name: str) -> str:
        return f"qcs::ssm:ap-singapore:uin/100000000001:secret/creatorUin/1/{name}"

    token = {"region": "ap-singapore", "name": "geo-ray-demo-token"}
    nodes = tencent_policy(
        tmp_path,
        kind="nodes-sg",
        secrets=[token],
        buckets=[{"region": "ap-singapore", "name": "demo-sg-data-1250000000"}],
    )
    head = tencent_policy(
        tmp_path, kind="head", secrets=[token], rents=True, passed_roles=["demo-nodes-sg"]
    )
    check_tencent_nodes(nodes, secret("geo-ray-demo-token"), secret("geo-ray-state-keys"))
    role = "qcs::cam::uin/100000000001:roleName/demo-nodes-sg"
    check_tencent_head(head, secret("geo-ray-demo-token"), role)
    data = "qcs::cos:ap-singapore:uid/1250000000:demo-sg-data-1250000000"
    assert allows(nodes, "cos:GetObject", f"{data}/rows/0.parquet")
    assert not allows(head, "cos:GetObject", f"{data}/rows/0.parquet")
