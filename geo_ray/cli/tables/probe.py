"""The table of `geo-ray probe`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.transport.links.record import LinkRecord


def print_links(records: Iterable[LinkRecord]) -> None:
    """One line per direction."""
    table = FittedTable(caption="spread is the median absolute deviation; ms are p50 / p99")
    table.add_column("from", no_wrap=True)
    table.add_column("to", no_wrap=True)
    for heading in ("Mbit/s", "spread", "RTT ms", "loaded ms", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.src,
            record.dst,
            _number(record.goodput_mbps),
            _number(record.goodput_mad_mbps),
            _pair_ms(record.rtt_s, record.rtt_p99_s),
            _pair_ms(record.rtt_loaded_s, record.rtt_loaded_p99_s),
            "-" if record.loss is None else f"{record.loss:.2%}",
        )
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pair_ms(middle_s: float | None, high_s: float | None) -> str:
    if middle_s is None:
        return "-"
    high = "-" if high_s is None else _number(high_s * 1e3)
    return f"{_number(middle_s * 1e3)} / {high}"
