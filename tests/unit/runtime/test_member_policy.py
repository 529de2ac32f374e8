"""Which changes of members are made, and why others are not; requests in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.runs.remote import REQUESTS
from geo_ray.runs.requests import (
    MemberRequest,
    forget_member_requests,
    request_member_change,
    take_member_requests,
)
from geo_ray.runtime.regions import MemberPolicy
from tests.support.train_support import experiment_of

REGIONS: list[dict[str, Any]] = [{"name": "us"}, {"name": "eu"}, {"name": "ap"}]


def refusal(tmp_path: Path, verb: Any, region: str, **more: Any) -> str | None:
    told = {"members": ("eu", "us"), "pending": (), "leader": "us", "standby": None}
    told["is_ending"] = False
    told |= {name: more.pop(name) for name in list(more) if name in told and name != "members"}
    told["members"] = more.pop("there", told["members"])
    policy = MemberPolicy(experiment_of(tmp_path, **{"regions": REGIONS} | more))
    return policy.refusal(MemberRequest(verb=verb, region=region), **told)  # type: ignore[arg-type]


def test_possible_requests_are_accepted(tmp_path: Path) -> None:
    assert refusal(tmp_path, "add", "ap") is None
    assert refusal(tmp_path, "drain", "eu") is None
    assert refusal(tmp_path, "remove", "eu") is None
    for verb in ("drain", "remove"):  # the averager moves first
        assert refusal(tmp_path, verb, "us", standby="eu") is None


@pytest.mark.parametrize(
    ("verb", "region", "more", "expected"),
    [
        ("add", "sa", {}, "there is no region 'sa'; regions of this run are us, eu, ap"),
        ("add", "eu", {}, "takes part already"),
        ("add", "ap", {"pending": ("ap",)}, "already joining or leaving"),
        ("add", "ap", {"is_ending": True}, "about to end"),
        ("add", "ap", {"overlay": {"kind": "binary"}, "strategy": {"kind": "bsp"}}, "overlay star"),
        ("add", "ap", {"regions": [{"name": "us", "ps_shards": 2}, *REGIONS[1:]]}, "ps_shards"),
        ("drain", "ap", {}, "'ap' does not take part"),
        ("drain", "us", {}, "hosts the averager"),
        (
            "remove",
            "eu",
            {"members": {"min": 2}},
            "requires 2 regions, and 2 are present",
        ),
        (
            "remove",
            "eu",
            {"there": ("eu",), "members": {"min": 1}},
            "members.min requires 1 region, and 1 is present",
        ),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(
    verb: str, region: str, more: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    why = refusal(tmp_path, verb, region, **more)
    assert why is not None and expected in why


def test_requests_are_taken_once_in_their_order(tmp_path: Path) -> None:
    assert take_member_requests(tmp_path) == []
    asked = [MemberRequest(verb="add", region="ap"), MemberRequest(verb="drain", region="eu")]
    ids = [request_member_change(tmp_path, request) for request in asked]
    (tmp_path / REQUESTS / "0.json").write_text('{"verb": "explode", "region": "eu"}')
    (tmp_path / REQUESTS / "1.json").write_bytes(b"\xff")
    taken = take_member_requests(tmp_path)
    assert [(each.verb, each.region) for each in taken] == [("add", "ap"), ("drain", "eu")]
    assert [each.id for each in taken] == ids and len(set(ids)) == 2
    assert take_member_requests(tmp_path) == [] and not list((tmp_path / REQUESTS).iterdir())


def test_requests_to_a_finished_run_are_forgotten(tmp_path: Path) -> None:
    forget_member_requests(tmp_path)
    request_member_change(tmp_path, MemberRequest(verb="add", region="ap"))
    forget_member_requests(tmp_path)
    assert take_member_requests(tmp_path) == []
