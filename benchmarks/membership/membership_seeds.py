"""Random histories of a simulated run's members, over all strategies; asked: 0 violations.

    python -m benchmarks.membership.membership_seeds --seeds 100000 --out FILE.json

Each seed draws a strategy, regions, links, speeds and checkpoints, lets regions join, leave, be
lost and come back, the averager's too, cuts links, and resumes the run from its last checkpoint:
`benchmarks.membership.histories`. There is one process for each core.

Parts of 100 seeds are kept in `FILE.parts.jsonl` as they are done, with the seed of everything that
was wrong; the same command goes on from there. One seed again: `--first SEED --seeds 1`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.common import support
from benchmarks.membership.seed_parts import Part, PartsFile, cuts, run_part
from geo_ray.runs.build import use_one_thread

SHOWN = ("region_joined", "region_drained", "region_lost", "averager_moved", "ended", "checkpoint")
QUICK_SEEDS = 400
PART_SEEDS = 100


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    machine = support.hardware()
    count = QUICK_SEEDS if options.quick else options.seeds
    file = PartsFile(options.out.with_suffix(".parts.jsonl"))
    wanted = cuts(options.first, count, PART_SEEDS)
    missing = [part for part in wanted if part not in file.parts]
    began_s, done = time.monotonic(), 0
    for part in _run_all(missing, options.processes):
        file.add(part)
        done += part.count
        for seed, what in part.violations.items():
            support.say(f"seed {seed}: {what}")
        _say_progress(missing, done, time.monotonic() - began_s)
    per_s = done / (time.monotonic() - began_s)
    parts = [file.parts[part] for part in wanted]
    figures = [
        support.Figure("violations", sum(len(p.violations) for p in parts), "count", "<= 0"),
        support.Figure("seeds", sum(p.count for p in parts), "count", ">= 2000"),
        support.Figure("seeds_per_s", per_s if done else None, "1/s"),
        support.Figure("processes", options.processes, "count"),
        support.Figure("cpu_s", sum(p.cpu_s for p in parts), "s"),
        *(_figure(kind, parts) for kind in SHOWN),
    ]
    support.finish("membership_seeds", machine, figures, options.out)


def _run_all(missing: list[tuple[int, int]], processes: int) -> Iterator[Part]:
    """The parts as they are done."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        pool = ProcessPoolExecutor(processes, spawn, use_one_thread)
        try:
            futures = [pool.submit(_run, *part, Path(directory)) for part in missing]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run(first: int, count: int, directory: Path) -> Part:
    # Each process has files of its own: it may write them while another reads its.
    return run_part(first, count, directory / str(os.getpid()))


def _say_progress(missing: list[tuple[int, int]], done: int, took_s: float) -> None:
    left = sum(count for _, count in missing) - done
    rate = done / took_s
    support.say(f"{done} seeds, {rate:.1f} a second, {left} left: {left / rate / 60:.0f} min")


def _figure(kind: str, parts: list[Part]) -> support.Figure:
    return support.Figure(kind, sum(part.counts.get(kind, 0) for part in parts), "count")


if __name__ == "__main__":
    main()
