"""Measurement of links: `probe`, `probe_host` and `serve_probes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from geo_ray.api.config import Config, FilePath, Overrides, source_of
from geo_ray.api.display import RunWatch, ShowProgress, Table
from geo_ray.base.errors import GeoRayError
from geo_ray.base.load import load_tree, override_items
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import duration_text, number_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.probe import ProbeStatus, probe_cluster
from geo_ray.transport.links import LinkTable, load_links, save_links
from geo_ray.transport.probe.hosts import ProbeAddress, ProbeSide, measure, serve
from geo_ray.transport.probe.plan import ProbePlan, ProbeProgress


@dataclass(frozen=True, repr=False)
class ProbeResult:
    """Measured links.

    Attributes:
        links: links that were measured; save them for `PlanInputs.links`.
        failures: reasons of failed measurements, by source and destination.
    """

    links: LinkTable
    failures: Mapping[tuple[str, str], GeoRayError] = field(default_factory=dict)

    def save(self, path: FilePath) -> Path:
        """Write the link table; in an existing table only the measured pairs are replaced.

        Raises:
            GeoRayError: the existing file is not a link table, or it cannot be written.
        """
        target = Path(path)
        table = load_links(target) if target.exists() else LinkTable()
        save_links(table.with_records(self.links.links), target)
        return target

    def table(self) -> Table:
        """Return a row per link."""
        return Table([link.model_dump(mode="json") for link in self.links.links])

    def __repr__(self) -> str:
        return f"<Probe: {len(self.links.links)} links, {len(self.failures)} not measured>"

    def _repr_html_(self) -> str:
        rows = [
            (
                link.src,
                link.dst,
                f"{number_text(link.goodput_mbps)} Mbit/s",
                duration_text(link.rtt_s),
                "-" if link.loss is None else f"{link.loss:.2%}",
            )
            for link in self.links.links
        ]
        return html_view(repr(self)[1:-1], ("from", "to", "goodput", "round trip", "loss"), rows)


def probe(
    config: Config,
    overrides: Overrides = (),
    *,
    how: ProbePlan | None = None,
    disjoint: bool = False,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> ProbeResult:
    """Measure every link between the regions of a configuration, on its cluster.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        how: durations of the probe; default: those of the command line.
        disjoint: probe disjoint pairs of regions in parallel.
        progress: as for `geo_ray.train`.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: there is only one region.
        GeoRayError: the cluster cannot be used, or no link could be measured.
    """
    experiment = load_tree(source_of(config, base_dir), override_items(overrides), Experiment)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    live = progress is True and console.is_terminal
    watch = RunWatch(progress=bool(progress) and not live)
    with Progress(*columns, console=console, disable=not live) as bars:
        bar = bars.add_task("preparing", total=None)
        said = ""

        def notify(line: str) -> None:
            nonlocal said
            if line != said:  # called repeatedly while a pair is measured
                said = line
                watch.notify(line)

        def on_phase(phase: str) -> None:
            notify(phase)
            bars.update(bar, description=phase)

        def on_status(status: ProbeStatus) -> None:
            pairs = ", ".join(f"{src} -> {dst}" for (src, dst), _ in status.now)
            notify(
                f"{status.done} of {status.total} measured" + (f", now {pairs}" if pairs else "")
            )
            lines = "\n".join(_line(*pair, now) for pair, now in status.now)
            bars.update(bar, description=lines or "next", completed=status.done, total=status.total)

        outcome = probe_cluster(
            experiment,
            how or ProbePlan(),
            on_status,
            on_phase,
            disjoint=disjoint,
        )
    return ProbeResult(outcome.table, outcome.failures)


def probe_host(
    address: str,
    side: ProbeSide | None = None,
    *,
    how: ProbePlan | None = None,
    progress: ShowProgress = False,
) -> ProbeResult:
    """Measure both directions between this host and a host that runs `serve_probes`.

    Args:
        address: HOST:PORT of the other host.
        side: name of this host, and the key or the certificates.
        how: durations of the probe.
        progress: as for `geo_ray.train`.

    Raises:
        ConfigError: the key is missing, or with certificates the name of the other host.
        GeoRayError: the host cannot be reached, refuses key or certificate, or does not answer.
    """
    console = Console(stderr=True, quiet=not progress)
    with console.status(f"connecting to {address}") as status:

        def show(src: str, dst: str, now: ProbeProgress) -> None:
            status.update(_line(src, dst, now))

        records = measure(address, side or ProbeSide(), how or ProbePlan(), show)
    return ProbeResult(LinkTable().with_records(records))


def serve_probes(
    bind: str = "0.0.0.0:8476",
    side: ProbeSide | None = None,
    *,
    once: bool = False,
    on_listening: Callable[[ProbeAddress], None] | None = None,
    on_served: Callable[[int], None] | None = None,
) -> None:
    """Serve `probe_host`, until Ctrl-C.

    Args:
        bind: HOST:PORT of TCP and UDP; port 0 selects a free port.
        side: this host; without certificates and key, a key is generated for this call.
        once: return after one probe.
        on_listening: called with the address and the generated key.
        on_served: called with the number of probes after each probe.

    Raises:
        GeoRayError: the port or the certificate cannot be used.
    """
    serve(bind, side or ProbeSide(), on_listening or _nothing, on_served or _nothing, once=once)


def _line(src: str, dst: str, now: ProbeProgress) -> str:
    rate = "" if now.rate_mbps is None else f", {number_text(now.rate_mbps)} Mbit/s"
    fraction = f" {now.fraction:.0%}" if now.fraction else ""
    return f"{src} -> {dst}: {now.phase}{fraction}{rate}"


def _nothing(observed: object) -> None:
    pass
