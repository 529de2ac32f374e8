"""Results of the API are readable: a short repr, a table in a notebook, tables as tables."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest

import geo_ray
from geo_ray.api.inventory import Inventory
from geo_ray.api.tables import Table
from geo_ray.scheduling.load.generate import LoadShape

_PLAIN = {"SourceFiles", "WantedStatistics", "LossGrid", "ProfileGrid", "PlanInputs"} | {
    "QueueUser",
    "QueueAnswer",
}
"""What callers make, and a result of two words, which the generated repr shows."""


def _results() -> list[type]:
    found = [getattr(geo_ray, name) for name in geo_ray.__all__ if name[0].isupper()]
    return [
        each
        for each in found
        if dataclasses.is_dataclass(each)
        and each.__module__.startswith("geo_ray.api.")
        and each.__name__ not in _PLAIN
    ]


@pytest.mark.parametrize("result", _results(), ids=lambda each: each.__name__)
def test_every_result_has_its_own_repr_and_a_view_for_notebooks(result: type) -> None:
    written = inspect.unwrap(result.__repr__)
    assert written.__code__.co_filename != "<string>", "the one that dataclasses generate"
    assert "dataclasses.py" not in written.__code__.co_filename
    assert callable(getattr(result, "_repr_html_", None))


def test_a_table_is_printed_with_numbers_to_the_right_and_words_to_the_left() -> None:
    rows = [
        {"region": "eu", "loss": 0.5, "steps": 10},
        {"region": "us-west", "loss": None, "steps": 2000},
    ]
    assert repr(Table(rows)).splitlines() == [
        "region   loss  steps",
        "eu        0.5     10",
        "us-west         2000",
    ]
    assert repr(Table([], {"region": str})).splitlines() == ["region", "(no rows)"]


def test_a_wide_or_long_table_says_what_it_leaves_out_and_cuts_no_number() -> None:
    wide = Table([{f"column_{n}": 123456.0 + n for n in range(30)}])
    lines = repr(wide).splitlines()
    assert max(map(len, lines[:2])) <= 120 and "column_29" in lines[2]
    shown = lines[1].split()
    assert shown == [f"{123456 + n}" for n in range(len(shown))]
    long = repr(Table([{"n": n} for n in range(10_000)])).splitlines()
    assert len(long) < 100 and any("more rows" in line for line in long)
    assert long[1].strip() == "0" and long[-1].strip() == "9999"


def test_a_printed_table_does_not_control_the_terminal() -> None:
    shown = repr(Table([{"na\x1bme": "a\x1b[2Jb\x9b"}]))
    assert shown.splitlines() == [r"na\x1bme", r"a\x1b[2Jb\x9b"]


def test_a_token_is_not_printed() -> None:
    assert "secret" not in repr(geo_ray.QueueUser("vision", "secret"))


def test_results_say_in_a_line_what_they_hold() -> None:
    found = geo_ray.schedule(["fifo"], shape=LoadShape(3, 1, 3))
    assert repr(found).startswith("<Schedule of ") and "fifo " in repr(found)
    assert "<td>fifo</td>" in found._repr_html_()
    stack = SimpleNamespace(
        places={
            "eu": SimpleNamespace(
                cloud="aws",
                at="eu-west-1",
                machines=[SimpleNamespace(type="m5.large", cap=4, markets=["spot"])],
            )
        }
    )
    offered = Inventory(stack)
    assert repr(offered) == "<Inventory: eu; 1 machine types>"
    assert "<td>m5.large</td>" in offered._repr_html_()
    row = SimpleNamespace(id="m-1", role="worker", region=None, type="<large>", state="running")
    report = SimpleNamespace(name="lab", phase="up", machines=[row], usd_per_hour=1.25)
    up = geo_ray.UpCluster(None, None, report)
    assert repr(up) == "<Cluster lab: up, 1 machines, 1.25 USD/h>"
    assert "<td>&lt;large&gt;</td>" in up._repr_html_()
