"""Verbs that look at something: `report`, `check_data`, `merge_data`, `prices`, `probe`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.api.inputs import Config, FilePath, Overrides, source_of
from geo_ray.api.run import open_run
from geo_ray.api.tables import Table, table_of
from geo_ray.clouds.price_book import known_book, own_files
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.config.source import override_items
from geo_ray.errors import GeoRayError
from geo_ray.runtime.control.probe import probe_cluster
from geo_ray.transport.links.table import LinkTable, load_links, save_links
from geo_ray.transport.probe.plan import ProbePlan


def report(run: FilePath, out: FilePath | None = None) -> Path:
    """Write the HTML page about a run and give its path.

    Args:
        run: its directory.
        out: the file; default: ``report.html`` in that directory.

    Raises:
        RunDirectoryError: there is no run, or the page cannot be written.
    """
    return open_run(run).report(out)


def prices(files: Sequence[FilePath] = ()) -> Table:
    """The known prices, a row each: those of files, and those that came with this release.

    Args:
        files: yours, of which the later count more; default: those in GEO_RAY_PRICES, else
            ``prices.json`` here.

    Raises:
        PriceBookError: a file cannot be read, or is not valid.
    """
    names = ("cloud", "region", "zone", "item", "type", "to", "market", "amount", "currency")
    kinds = dict.fromkeys((*names, "unit", "source"), str) | {"amount": float, "age_s": float}
    now = time.time()
    book = known_book([Path(file) for file in files] or own_files())
    return table_of(
        [
            {name: getattr(record, name) for name in (*names, "unit", "source")}
            | {"age_s": record.age_s(now)}
            for record in book.records
        ],
        kinds,
    )


@dataclass(frozen=True, repr=False)
class ProbeResult:
    """What the links between the regions of a cluster do.

    Attributes:
        links: those that could be measured; what `PlanInputs.links` takes once it is saved.
        failures: why the others could not, by source and destination.
    """

    links: LinkTable
    failures: dict[tuple[str, str], GeoRayError]

    def save(self, path: FilePath) -> Path:
        """Write the link table; of one that exists only the pairs that were measured change.

        Raises:
            GeoRayError: the file there is no link table, or it cannot be written.
        """
        target = Path(path)
        table = load_links(target) if target.exists() else LinkTable()
        save_links(table.with_records(self.links.links), target)
        return target

    def table(self) -> Table:
        """A row per link."""
        return table_of([link.model_dump(mode="json") for link in self.links.links])

    def __repr__(self) -> str:
        return f"<Probe: {len(self.links.links)} links, {len(self.failures)} not measured>"


def probe(
    config: Config,
    overrides: Overrides = (),
    *,
    how: ProbePlan | None = None,
    disjoint: bool = False,
    base_dir: FilePath | None = None,
) -> ProbeResult:
    """Measure every link between the regions of a configuration, on its cluster.

    Args:
        config: a file, a mapping, or what `load_config` gave.
        overrides: changes of single keys.
        how: for how long; default: as the command line does.
        disjoint: pairs of different regions at once.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: there is only one region.
        GeoRayError: the cluster cannot be used, or no link at all could be measured.
    """
    experiment = load_tree(source_of(config, base_dir), override_items(overrides), Experiment)
    outcome = probe_cluster(
        experiment, how or ProbePlan(), lambda _: None, lambda _: None, disjoint=disjoint
    )
    return ProbeResult(outcome.table, dict(outcome.failures))
