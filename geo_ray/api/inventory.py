"""`geo_ray.inventory`: what could be rented, as Terraform's outputs have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.api.inputs import FilePath
from geo_ray.api.tables import Table
from geo_ray.config.canonical import JSONValue
from geo_ray.config.yaml_text import write_yaml
from geo_ray.observe.html_view import html_view
from geo_ray.planning.inventory import inventory_tree
from geo_ray.providers.terraform.outputs import TerraformStack
from geo_ray.providers.terraform.read import read_stack


@dataclass(frozen=True, repr=False)
class Inventory:
    """What a stack says of itself.

    Attributes:
        stack: all of it.
    """

    stack: TerraformStack

    def table(self) -> Table:
        """A row per region and type of machine."""
        rows = [
            {
                "region": name,
                "cloud": place.cloud,
                "at": place.at,
                "type": one.type,
                "cap": one.cap,
                "markets": ", ".join(one.markets),
            }
            for name, place in self.stack.places.items()
            for one in place.machines
        ]
        return Table(rows)

    def __repr__(self) -> str:
        return f"<Inventory: {', '.join(self.stack.places)}; {len(self.table())} machine types>"

    def _repr_html_(self) -> str:
        found = self.table()
        rows = [[str(value) for value in row.values()] for row in found]
        return html_view(repr(self)[1:-1], found.column_names, rows)

    def config(self) -> dict[str, JSONValue]:
        """Sections of a configuration: `cluster`, `run` and `plan`."""
        return inventory_tree(self.stack)

    def yaml(self) -> str:
        """The same as text."""
        return write_yaml(self.config())


def inventory(from_terraform: FilePath) -> Inventory:
    """Read what a stack of infra/terraform offers.

    Args:
        from_terraform: the directory in which `terraform apply` ran, or a file with what
            `terraform output -json` printed there.

    Raises:
        TerraformOutputsError: there is none, it was not applied, or it is not of this release.
    """
    return Inventory(read_stack(Path(from_terraform)))
