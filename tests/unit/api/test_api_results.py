"""Results of the API are readable: a short repr, a table in a notebook, tables as tables."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import geo_ray
import geo_ray.api
from geo_ray.api.clusters import Inventory, UpCluster
from geo_ray.api.display import Table
from geo_ray.api.live import LivePage
from geo_ray.api.queue import QueueUser
from geo_ray.api.schedule import schedule
from geo_ray.cloud.cluster.offer import ClusterOffer, OfferedMachines
from geo_ray.cloud.cluster.status import ClusterReport
from geo_ray.program.result import ProgramResult
from geo_ray.scheduler.queue.report import QueueReport
from geo_ray.scheduler.workload import LoadShape
from geo_ray.telemetry.status import RegionStatus, RunStatus, SpentStatus
from geo_ray.telemetry.summary import Summary

_PLAIN = {"SourceFiles", "WantedStatistics", "LossGrid", "ProfileGrid", "PlanInputs"} | {
    "QueueUser",
    "QueueAnswer",
}
"""What callers make, and a result of two words, which the generated repr shows."""


_RECORDS = (
    *(RunStatus, QueueReport, ClusterReport, ClusterOffer),
    *(Summary, ProgramResult, LivePage),
)
"""Results that other packages than the API's make, or that are no records."""


_INTERNAL = {"Advice", "ReadyRun", "RunWatch", "Watched"}
"""What functions of the API pass to each other."""


def _results() -> list[type]:
    modules = [
        importlib.import_module(f"geo_ray.api.{each.name}")
        for each in pkgutil.iter_modules(geo_ray.api.__path__)
    ]
    made = [
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each)
        and dataclasses.is_dataclass(each)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("_")
        and each.__name__ not in _PLAIN | _INTERNAL
    ]
    return [*made, *_RECORDS]


@pytest.mark.parametrize("result", _results(), ids=lambda each: each.__name__)
def test_every_result_has_its_own_repr_and_a_view_for_notebooks(result: type) -> None:
    written = inspect.unwrap(result.__repr__)
    assert result.__repr__ is not object.__repr__
    place = Path(written.__code__.co_filename)
    assert place.is_relative_to(Path(geo_ray.__file__).parent), "not one that is generated"
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
    assert "column_29" in lines[-1]
    shown = lines[1].split()
    assert shown == [f"{123456 + n}" for n in range(len(shown))]
    empty = {f"longer_column_{n}": None if n < 3 else "x" * 90 for n in range(5)}
    heading, row, *hidden = repr(Table([empty])).splitlines()
    assert heading.split() == [f"longer_column_{n}" for n in (0, 1, 3, 4)]
    assert row.count("…") == 2 and hidden == ["(also the columns longer_column_2)"]
    assert max(map(len, lines)) <= 80
    long = repr(Table([{"n": n} for n in range(10_000)])).splitlines()
    assert len(long) < 100 and any("more rows" in line for line in long)
    assert long[1].strip() == "0" and long[-1].strip() == "9999"


def test_a_printed_table_does_not_control_the_terminal() -> None:
    shown = repr(Table([{"na\x1bme": "a\x1b[2Jb\x9b"}]))
    assert shown.splitlines() == [r"na\x1bme", r"a\x1b[2Jb\x9b"]


def test_a_token_is_not_printed() -> None:
    assert "secret" not in repr(QueueUser("vision", "secret"))


def test_results_say_in_a_line_what_they_hold() -> None:
    found = schedule(["fifo"], shape=LoadShape(3, 1, 3))
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
    up = UpCluster(None, None, report)
    assert repr(up) == "<Cluster lab: up, 1 machines, 1.25 USD/h>"
    assert "<td>&lt;large&gt;</td>" in up._repr_html_()


REGION = RegionStatus(
    **{"name": "eu", "state": "computing", "step": 1200, "steps": 2000, "exchanges": 3},
    **{"loss": 0.25, "samples": 9600, "samples_per_s": 50.0, "workers_lost": 0},
)
STATUS = RunStatus(
    **{"run": "runs/a", "phase": "training", "is_going": True, "loss": 0.25, "left_s": 42.0},
    **{"regions": (REGION,), "spent": SpentStatus(seconds=1.0, wan_bytes=0, usd=None)},
)
SUMMARY = Summary(
    **{"strategy": "sma", "seed": 0, "steps": 1200, "samples": 9600, "seconds": 90.0},
    **{"wan_bytes": {"update": 4_100_000}, "rounds": 12, "eval": {"accuracy": 0.5}},
    **{"faults": {"worker_lost": 2}},
)
JOB = SimpleNamespace(
    **{"name": "a<b>", "tenant": "red", "state": "waiting", "outcome": None, "done": 0.5},
    **{"message": "waits"},
)
MACHINE = SimpleNamespace(id="m-1", role="worker", region="eu", type="m5.large", state="running")
QUEUE = QueueReport.model_construct(name="q", policy="fifo", jobs=(JOB,), is_served=False)
CLUSTER = ClusterReport.model_construct(
    **{"name": "lab", "phase": "up", "machines": (MACHINE,), "head": None},
    **{"usd_per_hour": 1.25, "spent_usd": 3.0},
)
OFFERED = OfferedMachines(
    **{"region": "eu", "role": "worker", "at": "eu-west-1a", "type": "m5.large"},
    **{"market": "on_demand", "count": 2, "usd_per_hour": 0.1},
)
OFFER = ClusterOffer.model_construct(
    name="lab", machines=(OFFERED,), usd_per_hour=0.2, total_usd=1.5
)
PROGRAM: Any = SimpleNamespace(name="rank")
ENDED = ProgramResult(PROGRAM, "threads", {"ranker": 1}, 90.0, (), {})


@pytest.mark.parametrize(
    ("result", "line", "cells"),
    [
        (STATUS, "<RunStatus runs/a: training, mean loss 0.25, about 42 s left>", "1,200 of 2,000"),
        (SUMMARY, "<Summary sma, seed 0: 1,200 steps in 1:30, accuracy 0.5>", "4.1 MB"),
        (QUEUE, "<QueueReport q: fifo, 1 job, 0 running, 1 waiting, not served>", "a&lt;b&gt;"),
        (CLUSTER, "<ClusterReport lab: up, 1 machine, 1.25 USD/h, 3 USD so far>", "m5.large"),
        (
            OFFER,
            "<ClusterOffer lab: 2 machines for 0.2 USD/h, the run 1.5 USD as planned>",
            "on-demand",
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_records_say_in_a_line_what_they_hold(result: Any, line: str, cells: str) -> None:
    assert repr(result) == str(result) == line
    assert f"<td>{cells}</td>" in result._repr_html_()


def test_a_program_and_a_page_say_in_a_line_what_they_are(tmp_path: Path) -> None:
    assert repr(ENDED) == "<ProgramResult rank: 1:30 (threads), 1 instance>"
    assert str(ENDED).startswith("program rank: 1:30") and "<table>" in ENDED._repr_html_()
    with geo_ray.watch(tmp_path / "run<1>") as page:
        assert repr(page).endswith("run<1>: 0 watching; its address is .url>")
        for text in (repr(page), page._repr_html_()):
            assert page.url not in text and page.url.rpartition("/")[2] not in text
        assert "run&lt;1&gt;" in page._repr_html_()
    assert "closed" in repr(page)


def test_the_line_of_a_record_does_not_control_the_terminal() -> None:
    assert repr(STATUS.model_copy(update={"run": "\x1b[2J"})).startswith(r"<RunStatus \x1b[2J: ")
