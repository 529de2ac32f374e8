"""Cuts the part that infra/terraform uses out of a description of Tencent's provider.

python tests/unit/cloud/cut_schema.py DESCRIPTION.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
INFRA = HERE.parents[2] / "infra" / "terraform"


def used() -> tuple[set[str], set[str]]:
    """Kinds of resources and of data sources that the files name."""
    text = "\n".join(path.read_text() for path in INFRA.rglob("*.tf"))
    return tuple(
        set(re.findall(rf'^{word} "(tencentcloud_\w+)"', text, flags=re.M))
        for word in ("resource", "data")
    )  # type: ignore[return-value]


def main(source: Path) -> None:
    """Write the part beside this file."""
    whole = json.loads(source.read_text())
    resources, data = used()
    part = {
        "about": whole["about"],
        "provider": {"arguments": {name: {} for name in whole["provider"]["arguments"]}},
        "resources": {name: whole["resources"][name] for name in sorted(resources)},
        "data_sources": {name: whole["data_sources"][name] for name in sorted(data)},
    }
    (HERE / "tencent_schema.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
