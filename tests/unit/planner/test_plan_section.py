"""The example that is shown for a configuration without a section `plan`."""

from __future__ import annotations

import re

from geo_ray.planner.config import no_plan_section
from geo_ray.prices.price_book import bundled_book


def places(*regions: str) -> dict[str, str]:
    fix = no_plan_section(regions).fix
    return dict(re.findall(r"(\S+): \{cloud: aws, at: ([a-z0-9-]+),", fix))


def test_each_region_has_a_place_of_its_own() -> None:
    found = places("us-east", "here", "eu-west", "there")
    assert found["us-east"] == "us-east-1" and found["eu-west"] == "eu-west-1"
    assert len(set(found.values())) == 4, "what crosses between them has a price"


def test_more_regions_than_places_still_get_one_each() -> None:
    names = [f"r{number}" for number in range(30)]
    assert list(places(*names)) == names


def test_every_place_has_prices_of_machines_and_traffic() -> None:
    records = bundled_book().records
    for at in set(places(*(f"r{number}" for number in range(30))).values()):
        here = [each for each in records if each.region == at]
        assert any(each.item == "egress" for each in here), at
        assert any(each.type == "g5.xlarge" and each.market == "on_demand" for each in here), at
