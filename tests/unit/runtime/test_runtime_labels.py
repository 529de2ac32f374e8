from __future__ import annotations

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.ray_cluster.labels import (
    REGION_LABEL,
    check_region_name,
    in_region,
    in_regions,
    label_flag,
    on_node,
    outside_regions,
)


def test_selectors_have_no_blanks() -> None:
    assert in_region("eu-west") == {REGION_LABEL: "eu-west"}
    assert in_regions(["us", "ap-sg", "us"]) == {REGION_LABEL: "in(ap-sg,us)"}
    assert outside_regions(("us", "eu")) == {REGION_LABEL: "!in(eu,us)"}
    assert on_node("ab12") == {"ray.io/node-id": "ab12"}
    assert label_flag("eu") == "ray.io/availability-region=eu"


@pytest.mark.parametrize("name", ["a", "A9", "eu-west-1", "a.b_c-d", "x" * 63])
def test_good_names(name: str) -> None:
    assert check_region_name(name) == name


@pytest.mark.parametrize(
    "name", ["", " ", "eu west", "-eu", "eu-", "a,b", "in(a)", "!a", "é", "x" * 64, "a\n", "a=b"]
)
def test_bad_names(name: str) -> None:
    for use in (check_region_name, in_region, label_flag, lambda n: in_regions(["ok", n])):
        with pytest.raises(ConfigError, match="region"):
            use(name)


def test_no_region_at_all() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        in_regions([])
