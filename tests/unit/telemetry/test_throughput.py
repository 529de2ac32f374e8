"""Tokens per second, MFU and GPU memory in status, live page and report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geo_ray.telemetry.columns import record
from geo_ray.telemetry.live.page import _regions as live_regions
from geo_ray.telemetry.sections import regions_section
from geo_ray.telemetry.status import (
    RegionStatus,
    RunStatus,
    SpentStatus,
    StatusFold,
    speed_of,
    status_lines,
)
from geo_ray.telemetry.throughput import Throughput, mfu_text, peak_flops, speed_texts
from tests.support.observe_support import Row, events, started, step

GB = 10**9


def device(region: str, worker: int, t_s: float, name: str = "NVIDIA A100-SXM4-80GB") -> Row:
    fields = {"region": region, "worker": worker, "device": name, "share": 1.0}
    return ("device", t_s, fields | {"peak_bytes": 7 * GB, "total_bytes": 80 * GB})


def a_run(**changes: object) -> list[Row]:
    """East has two A100, west one; a step takes one second and has 32 rows, of 100 tokens each."""
    about = {"tokens_per_row": 100, "flops_per_row": 6e9, "flops_estimated": True} | changes
    rows = [started(steps={"east": 100, "west": 100}, **about)]
    rows += [device("east", 0, 0.5), device("east", 1, 0.5), device("west", 0, 0.5)]
    for number in range(1, 41):
        rows += [
            step(region, number, float(number), compute_s=0.75, wait_s=0.25)
            for region in ("east", "west")
        ]
    return rows


def fold_of(rows: list[Row]) -> tuple[StatusFold, tuple[RegionStatus, ...]]:
    fold = StatusFold()
    for event in events(rows):
        fold.feed(event)
    return fold, fold.regions(is_going=True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A1000", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_speeds_are_those_of_a_calculation_by_hand() -> None:
    fold, (east, west) = fold_of(a_run())
    rows_per_s = 32.0  # in each region
    assert east.tokens_per_s == pytest.approx(100 * rows_per_s, rel=0.11)  # of a 10 s window
    assert east.tokens_per_s == 100 * east.samples_per_s
    assert west.mfu == pytest.approx(6e9 * west.samples_per_s / 312e12)
    assert east.mfu == pytest.approx(6e9 * east.samples_per_s / (2 * 312e12))
    assert east.memory == (7 * GB, 80 * GB)
    tokens_per_s, mfu = speed_of((east, west), fold.totals.throughput)
    both = east.samples_per_s + west.samples_per_s
    assert tokens_per_s == pytest.approx(100 * both)
    assert mfu == pytest.approx(6e9 * both / (3 * 312e12))


def test_a_worker_that_is_gone_counts_no_longer_and_its_memory_stays() -> None:
    gone = ("worker_lost", 40.0, {"region": "east", "worker": 1, "cause": "killed"})
    _, (east, west) = fold_of([*a_run(), gone])
    assert east.mfu == pytest.approx(west.mfu) and east.memory == (7 * GB, 80 * GB)


@pytest.mark.parametrize(
    "rows",
    [
        a_run(flops_per_row=None),
        [*a_run(), device("west", 0, 40.0, "NVIDIA Unknown")],
        [row for row in a_run() if row[0] != "device" or row[2]["region"] == "east"],
    ],
    ids=["operations", "peak", "a region without a GPU"],
)
def test_what_is_unknown_is_not_shown(rows: list[Row]) -> None:
    fold, (east, west) = fold_of(rows)
    assert west.mfu is None and west.tokens_per_s is not None
    assert speed_of((east, west), fold.totals.throughput)[1] is None


def test_a_task_without_tokens_looks_as_before() -> None:
    plain = [row for row in a_run() if row[0] != "device"]
    plain[0] = started(steps={"east": 100, "west": 100})
    _, regions = fold_of(plain)
    assert all(each.tokens_per_s is each.mfu is each.memory is None for each in regions)
    for page in (live_regions(regions), regions_section(record(events(plain)))):
        assert not re.search("tokens|MFU|GPU", page)
    assert not re.search("tokens|MFU|GPU", "\n".join(lines_of(plain)))


def lines_of(rows: list[Row]) -> list[str]:
    fold, regions = fold_of(rows)
    tokens_per_s, mfu = speed_of(regions, fold.totals.throughput)
    return status_lines(
        RunStatus(
            run="r",
            phase="training",
            is_going=True,
            regions=regions,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            mfu_is_estimated=fold.totals.throughput.estimated,
            samples_per_s=sum(each.samples_per_s for each in regions),
            spent=SpentStatus(seconds=1.0, wan_bytes=0, usd=None),
        )
    )


def test_status_live_page_and_report_show_them(tmp_path: Path) -> None:
    rows = a_run(flops_per_row=6e11)
    text = "\n".join(lines_of(rows))
    assert re.search(r"east: .* samples/s, [\d,]+ tokens/s, MFU 3\.\d%, GPU memory 7 GB of", text)
    assert re.search(r"training .* samples/s, [\d,]+ tokens/s, MFU 4\.\d% \(estimated\)", text)
    page = live_regions(fold_of(rows)[1])
    assert all(f">{each}<" in page for each in ("tokens/s", "MFU", "GPU memory"))
    assert "7 GB of 80 GB" in page
    report = regions_section(record(events(rows)))
    # 40 steps of 32 rows in 40 s of compute and waiting
    assert ">3,200<" in report and f">{6e11 * 32 / (2 * 312e12):.1%}<" in report
    assert "MFU is estimated" in report
    stated = regions_section(record(events(a_run(flops_estimated=False))))
    assert "MFU" in stated and "estimated" not in stated
    for page in (report, stated):
        assert re.search(r"assumed peaks in 16 bits: [^<]*A100[^<]* 312 TFLOP/s", page)


def test_a_resumed_run_waits_for_the_devices_of_its_new_processes() -> None:
    throughput = Throughput()
    for event in events([*a_run(), started(tokens_per_row=100, flops_per_row=6e9)]):
        throughput.feed(event)
    assert throughput.mfu({"east": 1.0}) is None and not throughput.estimated


def test_speeds_in_words() -> None:
    assert speed_texts(None, None) == [] and mfu_text(None) == "-"
    assert speed_texts(12.34, 0.4111) == ["12.3 tokens/s", "MFU 41.1%"]
    assert speed_texts(98_765.4, 0.5, estimated=True) == [
        "98,765 tokens/s",
        "MFU 50.0% (estimated)",
    ]
