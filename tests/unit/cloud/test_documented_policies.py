"""The policies of infra/policies allow exactly the requests of geo_ray."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.policy_support import (
    allows,
    check_aws_head,
    check_aws_nodes,
    check_tencent_head,
    check_tencent_nodes,
)

ROOT = Path(__file__).parents[3]
POLICIES = ROOT / "infra" / "policies"
PAGE = ROOT / "docs" / "operations" / "cloud-accounts.md"
NAMES = {"ACCOUNT": "123456789012", "BUCKET": "demo-runs", "NAME": "demo", "REGION": "eu"}


def policies() -> list[dict[str, Any]]:
    found = []
    for file in re.findall(r"^\| `([\w-]+\.json)` \|", PAGE.read_text(), re.M):
        text = (POLICIES / file).read_text()
        for name, value in (NAMES | {"AT": "ap-singapore"}).items():
            text = re.sub(rf"\b{name}\b", value, text)
        found.append(json.loads(text))
    return found


def test_of_aws() -> None:
    nodes, head, _, _ = policies()
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:"
    token = f"{secret}geo-ray-demo-0123456789-token-Ab1"
    check_aws_nodes(nodes, token, f"{secret}geo-ray-other-0123456789-token-Ab1")
    check_aws_head(head, token, "arn:aws:iam::123456789012:role/geo-ray-node")
    assert allows(head, "s3:ListBucketMultipartUploads", "arn:aws:s3:::demo-runs")
    other = "arn:aws:s3:::demo-runs/clusters/other/cluster.json/00000000000000000001"
    assert not allows(head, "s3:PutObject", other)


def test_of_tencent_cloud() -> None:
    _, _, nodes, head = policies()
    secret = "qcs::ssm:ap-singapore:uin/123456789012:secret/creatorUin/1/"
    token = f"{secret}geo-ray-demo-0123456789-token"
    check_tencent_nodes(nodes, token, f"{secret}state-keys")
    check_tencent_head(head, token, "qcs::cam::uin/123456789012:roleName/geo-ray-node")
    assert allows(head, "ssm:GetSecretValue", f"{secret}state-keys")
