"""Topologies: presets, files, refused input, and the plan for the relay."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_text
from geo_ray.lab.plan import from_json, to_json
from geo_ray.lab.topology import Topology, compile_plan, load_topology, preset_names


def topology(text: str) -> Topology:
    return load_text(text, (), Topology, "test")


def test_there_are_the_four_presets() -> None:
    assert set(preset_names()) == {"flat-100", "four-continents", "uniform-20-155", "poor-10"}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_goes_to_the_relay_and_back(name: str) -> None:
    loaded = load_topology(name)
    assert loaded.name == name
    plan = compile_plan(loaded, "abc123")
    assert from_json(to_json(plan)) == from_json(to_json(from_json(to_json(plan))))
    count = len(loaded.regions)
    assert len(plan.links) == count * (count - 1)
    assert len({station.namespace for station in plan.stations}) == count


def test_presets_match_their_names() -> None:
    flat = compile_plan(load_topology("flat-100"), "x").links
    assert {(link.shape.rate_mbps, link.shape.delay_s) for link in flat} == {(100, 0.05)}
    poor = compile_plan(load_topology("poor-10"), "x").links
    assert {(p.shape.rate_mbps, p.shape.delay_s, p.shape.loss) for p in poor} == {(10, 0.3, 0.01)}
    drawn = compile_plan(load_topology("uniform-20-155"), "x").stations
    traces = [trace for s in drawn for trace in (s.up_trace, s.down_trace) if trace is not None]
    assert {(t.low_mbps, t.high_mbps, t.every_s) for t in traces} == {(20, 155, 180)}
    assert len({trace.seed for trace in traces}) == 18


def test_four_continents_is_the_measured_table() -> None:
    loaded = load_topology("four-continents")
    assert loaded.link_between("us", "eu").rate_mbps == 210
    assert loaded.link_between("eu", "us").rate_mbps == 212
    assert 2 * loaded.link_between("eu", "australia").delay_s == pytest.approx(0.272)


def test_a_named_link_changes_only_what_it_names() -> None:
    loaded = topology(
        """
        link: {rate_mbps: 100, delay_s: 0.05, loss: 0.01}
        regions: [{name: A}, {name: B}, {name: C, congestion_control: bbr, up: {rate_mbps: 5}}]
        up: {rate_mbps: 50}
        links: [{src: A, dst: B, rate_mbps: 30}]
        """
    )
    link = loaded.link_between("A", "B")
    assert (link.rate_mbps, link.delay_s, link.loss) == (30, 0.05, 0.01)
    assert loaded.link_between("B", "A").rate_mbps == 100
    plan = compile_plan(loaded, "x")
    assert [s.congestion_control for s in plan.stations] == ["cubic", "cubic", "bbr"]
    assert [s.up.rate_mbps for s in plan.stations] == [50, 50, 5]


def test_a_named_rate_wins_over_the_default_trace() -> None:
    loaded = topology(
        """
        link: {trace: {kind: points, points: [[0, 10], [5, 20]]}}
        regions: [{name: A}, {name: B}]
        links: [{src: A, dst: B, rate_mbps: 30}]
        """
    )
    plan = compile_plan(loaded, "x")
    assert [link.trace is None for link in plan.links] == [True, False]


def test_seeds_differ_by_pair_and_follow_the_topologys() -> None:
    def seeds(seed: int) -> list[int]:
        text = f"seed: {seed}\nregions: [{{name: A}}, {{name: B}}]"
        return [link.seed for link in compile_plan(topology(text), "x").links]

    assert len(set(seeds(1) + seeds(2))) == 4
    assert seeds(1) == seeds(1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("regions: []", "regions"),
        ("regions: [{name: A}]\nspeed: 1", "speed"),
        ("regions: [{name: A, upp: {}}]", "upp"),
        ("regions: [{name: A}, {name: A}]", "A is there more than once"),
        ("regions: [{name: '../x'}]", "regions.0.name .*expected 1 to 63 letters"),
        ("regions: [{name: A}]\nlink: {loss: 1.5}", "loss"),
        ("regions: [{name: A}]\nlink: {rate_mbps: 0}", "rate_mbps"),
        ("regions: [{name: A}]\nlink: {delay_s: -1}", "delay_s"),
        ("regions: [{name: A}]\nmtu: 500", "mtu"),
        ("regions: [{name: A}]\ncongestion_control: vegas", "congestion_control"),
        (
            "regions: [{name: A}, {name: B}]\nlinks: [{src: A, dst: Z}]",
            "links.0.dst .*no region 'Z'; the regions are A, B",
        ),
        ("regions: [{name: A}, {name: B}]\nlinks: [{src: A, dst: A}]", "leads to another region"),
        (
            "regions: [{name: A}, {name: B}]\nlinks: [{src: A, dst: B}, {src: A, dst: B}]",
            "A to B is given more than once",
        ),
        ("regions: [{name: A}]\nup: {trace: {kind: points, points: [[1, 5]]}}", "begin at 0"),
        ("regions: [{name: A}]\nup: {trace: {kind: points, points: [[0, 5], [0, 6]]}}", "ascend"),
        (
            "regions: [{name: A}]\n"
            "up: {trace: {kind: uniform, low_mbps: 9, high_mbps: 5, every_s: 1}}",
            "above high_mbps",
        ),
    ],
)
def test_impossible_values_are_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        topology(text)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_topology("flat-1000")
    assert "flat-1000" in caught.value.message and "flat-100" in caught.value.fix


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("regions: [{name: A}, {name: B}]\n")
    assert load_topology(path).region_names == ("A", "B")
    assert load_topology(str(path), ["link.rate_mbps=7"]).link.rate_mbps == 7
    with pytest.raises(ConfigError, match="cannot be read"):
        load_topology(tmp_path / "none.yaml")
