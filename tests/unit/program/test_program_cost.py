"""What a program costs, against a second program that is written from the rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geo_ray.base.errors import PriceUnknownError, ProgramInvalidError
from geo_ray.prices.price import PriceRecord
from geo_ray.prices.price_book import PriceBook
from geo_ray.program.calls import EdgeTraffic
from geo_ray.program.graph import NodeGroup, Program, ProgramNode
from geo_ray.program.result import ProgramResult, cost_of

A = ProgramNode("a", object)
B = ProgramNode("b", dict, (A.handle,))
PLACES = {"eu": "aws:eu-west-1", "us": "aws:us-east-1"}


def record(**keys: Any) -> PriceRecord:
    known = {"cloud": "aws", "currency": "USD", "fetched_at": "2026-11-01T00:00:00Z",
             "source": "test", "valid_for_s": 1e6}  # fmt: skip
    return PriceRecord.model_validate_json(json.dumps(known | keys))


BOOK = PriceBook(
    records=(
        record(region="eu-west-1", item="instance", type="m5.large", unit="hour", amount=0.2),
        record(region="us-east-1", item="instance", type="m5.large", unit="hour", amount=0.1),
        record(region="us-east-1", item="egress", to="*", unit="GB", amount=0.02),
        record(region="us-east-1", item="egress", to="internet", unit="GB", amount=0.09),
        record(region="eu-west-1", item="egress", to="*", unit="GB", amount=0.05),
    )
)


def result(places: dict[str, str], machine: str | None = "aws:m5.large") -> ProgramResult:
    groups = (
        NodeGroup("eu", (A,), replicas=3, machine=machine),
        NodeGroup("us", (B,), machine=machine),
    )
    program = Program("p", groups, places=places)
    traffic = (EdgeTraffic(program.edges[0], 1000, 3_000_000_000, 500_000_000),)
    return ProgramResult(program, "virtual", {}, 1800.0, traffic, {})


def test_machines_and_bytes_are_priced() -> None:
    cost = cost_of(result(PLACES), BOOK, {"train": 2.5})
    there_gb, back_gb = 3.0 + 1000 * 256e-9, 0.5 + 1000 * 256e-9
    assert cost.machines_usd == pytest.approx({"a": 3 * 0.5 * 0.2, "b": 0.5 * 0.1})
    assert cost.egress_usd == pytest.approx(
        {("us", "eu"): there_gb * 0.02, ("eu", "us"): back_gb * 0.05}
    )
    assert cost.usd == pytest.approx(0.3 + 0.05 + there_gb * 0.02 + back_gb * 0.05 + 2.5)
    assert cost.plain()["usd"] == cost.usd
    assert "3 GB from us to eu" in str(cost)


def test_another_cloud_is_reached_by_the_internet() -> None:
    places = {"eu": "tencent:eu-frankfurt", "us": "aws:us-east-1"}
    found = result(places, None)
    with pytest.raises(PriceUnknownError, match="tencent egress"):
        cost_of(found, BOOK)
    (edge,) = (each.edge for each in found.traffic)
    nothing_back = ProgramResult(
        found.program, "virtual", {}, 1.0, (EdgeTraffic(edge, 0, 10**9, 0),), {}
    )
    assert cost_of(nothing_back, BOOK).egress_usd == pytest.approx({("us", "eu"): 0.09})


def test_without_places_nothing_has_a_price() -> None:
    with pytest.raises(ProgramInvalidError, match="region eu has no place") as caught:
        cost_of(result({}), BOOK)
    assert "places={'eu': 'aws:eu-central-1'}" in caught.value.fix
    free = cost_of(result({}, None), BOOK)
    assert free.usd == 0.0
    assert free.cross_region_bytes == {("us", "eu"): 3_000_256_000, ("eu", "us"): 500_256_000}


def test_nodes_without_a_machine_or_place_are_unpriced() -> None:
    cost = cost_of(result({}, machine=None), BOOK, {"b": 1.0})
    assert cost.unpriced == ("a",)
    assert cost.usd == 1.0
    assert cost.plain()["unpriced"] == list(cost.unpriced)
    lines = [line.strip() for line in str(cost).splitlines()]
    assert "not priced  a: it names no machine" in lines
    assert any(line.startswith("not priced  3 GB from us to eu") for line in lines)
    assert cost_of(result(PLACES), BOOK).unpriced == ()
