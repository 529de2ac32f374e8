"""The page `docs/reference/generated/states.md`, made from the state tables.

``python -m geo_ray.testing.states_page docs/reference/generated/states.md`` writes it; a test
holds the file against
`page`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from geo_ray.base.states import StateTable
from geo_ray.cloud.autoscaler.state import INSTANCE
from geo_ray.runtime.actor import ACTOR
from geo_ray.runtime.regions import REGION
from geo_ray.scheduler.queue.state import JOB

TABLES: Final[tuple[tuple[StateTable[Any, Any], str], ...]] = (
    (REGION, "geo_ray/runtime/regions.py"),
    (ACTOR, "geo_ray/runtime/actor.py"),
    (INSTANCE, "geo_ray/cloud/autoscaler/state.py"),
    (JOB, "geo_ray/scheduler/queue/state.py"),
)
"""Every state machine, and the file that declares it."""

_HEAD: Final = """\
<!-- Written by geo_ray/testing/states_page.py from the state tables: edit those. -->

# States

Objects with a life cycle have one state, an enum, and change it by one transition function. The
diagrams below are generated from the tables that the code runs. An event that a table does not list
for a state is a programming error.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(table, file) for table, file in TABLES)])


def _section(table: StateTable[Any, Any], file: str) -> str:
    rows = "\n".join(f"| `{state.value}` | {text} |" for state, text in table.states.items())
    return (
        f"## {table.name}\n\nDeclared in `{file}`.\n\n| State | Meaning |\n| --- | --- |\n"
        f"{rows}\n\n```mermaid\n{table.mermaid()}\n```\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
