"""What a cut of the link costs a transfer that is under way. Needs root (the WAN lab).

Two processes with the product's own `Endpoint`, TLS on, CUBIC, 100 Mbit/s and 50 ms one way; 64 MB
are sent, and 2.5 s later the link loses everything in both directions for 5, 30 or 120 s.

  cut_N_heal_to_done   from the moment at which packets pass again until all 64 MB are there; beside
                       it what the rest of the transfer needs at the speed before the cut
  cut_N_lost           the difference: how long the transport takes to notice and be as fast again
  cut_N_resent         bytes that went over the socket twice
  cut_N_reconnects     connections that were made anew; 0 if the old one has survived

Runs with the same cut overlap, in labs of their own, so that no two of them transfer at once. One
whose relay was late is rejected and repeated alone, twice at most.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.common import support
from benchmarks.common.lab_runs import LabRuns, judged, lab_runs
from benchmarks.transport.wan import MB, linked
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats

SIZE_BYTES = 64 * MB
CUT_AFTER_S = 2.5
MIN_INTERVAL_S = 25.0  # between the starts of runs that overlap
CUTS_S = (5, 30, 120)
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Seen:
    """One cut.

    Attributes:
        rest_s: what was left to send would have taken so long.
        done_s: from the heal to the end.
        resent_bytes: sent twice.
        reconnects: connections made anew.
    """

    rest_s: float
    done_s: float
    resent_bytes: int
    reconnects: int


def cut(cut_s: int, begin_s: float) -> tuple[dict[str, Any], LabStats]:
    """Send, cut, heal, after a pause."""
    time.sleep(begin_s)
    with linked(100, 0.0, "cubic") as (a, _, lab), ThreadPoolExecutor(1) as pool:
        before = a.ask("send", size_bytes=SIZE_BYTES, count=2, pause_s=0.5)

        def send_and_cut(lab: Lab) -> Seen:
            sending = pool.submit(a.ask, "send", size_bytes=SIZE_BYTES, count=1, pause_s=0.5)
            time.sleep(CUT_AFTER_S)
            lab.cut("A", "B")
            time.sleep(cut_s)
            lab.heal("A", "B")
            healed_s = time.monotonic()  # the same clock in every process of the machine
            after = sending.result()
            return Seen(
                before["times_s"][-1] - CUT_AFTER_S,
                after["arrived_s"][0] - healed_s,
                after["resend_bytes"] - before["resend_bytes"],
                after["reconnects"] - before["reconnects"],
            )

        seen, stats = judged(lab, partial(send_and_cut, lab))
    return asdict(seen), stats


def cuts(runs: LabRuns, cut_s: int, count: int) -> list[Seen]:
    """Runs that overlap; rejected ones are repeated one by one."""

    def take(number: int, begin_s: float, attempts: int) -> Seen | None:
        measure = partial(cut, cut_s, begin_s)
        return runs.take(f"cut_{cut_s}/{number}", measure, lambda value: Seen(**value), attempts)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: take(number, number * MIN_INTERVAL_S, 1), range(count)))
    found = [take(number, 0.0, REPEATS) for number in range(count)]
    return [seen for seen in found if seen is not None]


def figures_of(cut_s: int, seen: list[Seen]) -> list[support.Figure]:
    done_s = [each.done_s for each in seen]
    rest_s = support.median("", [each.rest_s for each in seen], "s").value
    name = f"cut_{cut_s}"
    done = support.median(f"{name}_heal_to_done", done_s, "s")
    return [
        support.Figure(done.name, done.value, "s", None, rest_s, done_s),
        support.median(f"{name}_lost", [each.done_s - each.rest_s for each in seen], "s"),
        support.median(f"{name}_resent", [each.resent_bytes / MB for each in seen], "MB"),
        support.median(f"{name}_reconnects", [each.reconnects for each in seen], "times"),
    ]


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    count = 1 if options.quick else 3
    figures = []
    with lab_runs(options.out) as runs:
        for cut_s in CUTS_S[:1] if options.quick else CUTS_S:
            support.say(f"a cut of {cut_s} s, {count} runs")
            figures += figures_of(cut_s, cuts(runs, cut_s, count))
        support.finish("wan_trouble", machine, figures, options.out, runs.finish())


if __name__ == "__main__":
    main()
