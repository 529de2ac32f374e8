"""`geo_ray.check`: does a strategy, a codec or a task keep what all of them promise?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.api.inputs import FilePath
from geo_ray.api.tables import Table
from geo_ray.config.source import override_items
from geo_ray.contract.findings import Finding
from geo_ray.contract.load import checked, load
from geo_ray.observe.html_view import html_view


@dataclass(frozen=True, repr=False)
class PromiseCheck:
    """What the checks of a strategy, a codec or a task found.

    Attributes:
        name: of the class.
        findings: one per promise.
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Those of promises that are not kept."""
        return tuple(finding for finding in self.findings if finding.why is not None)

    def table(self) -> Table:
        """A row per promise; ``why`` is null where it is kept."""
        rows = [{"promise": finding.promise, "why": finding.why} for finding in self.findings]
        return Table(rows, {"promise": str, "why": str})

    def __repr__(self) -> str:
        kept = len(self.findings) - len(self.broken)
        return f"<PromiseCheck {self.name}: {kept} of {len(self.findings)} promises kept>"

    def _repr_html_(self) -> str:
        rows = [(finding.promise, finding.why or "kept") for finding in self.findings]
        return html_view(repr(self)[1:-1], ("promise", "state"), rows)


def check(
    name: str,
    options: Mapping[str, Any] | Sequence[str] = (),
    *,
    base_dir: FilePath | None = None,
) -> PromiseCheck:
    """Put a strategy, a codec or a task to the checks that those of the library pass.

    Args:
        name: ``path/to/file.py:Class`` of your own, ``package.module:Class``, or a name of the
            library.
        options: of the class, by name, or ``key=value`` each; a short interval makes it quick.
        base_dir: where a relative path starts; default: the working directory.

    Raises:
        ConfigError: there is no such class, or it cannot be used.
        TaskError: it is a task that cannot be built.
    """
    subject = load(name, override_items(options), Path(base_dir or Path.cwd()))
    return PromiseCheck(name, tuple(checked(subject)))
