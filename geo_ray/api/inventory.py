"""`geo_ray.inventory`: rentable machines from Terraform outputs, as configuration sections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.api.config import FilePath
from geo_ray.api.display import Table
from geo_ray.base.canonical import JSONValue
from geo_ray.base.tables import html_view
from geo_ray.base.yaml import write_yaml
from geo_ray.cloud.terraform import TerraformStack, read_stack
from geo_ray.planner.config import MachineConfig, RegionOffer


def offers_of(stack: TerraformStack) -> dict[str, RegionOffer]:
    """Return the section `plan.regions`; speeds, rows and prices are not Terraform's to know."""
    return {
        name: RegionOffer(
            cloud=place.cloud,
            at=place.at,
            machines=tuple(
                MachineConfig(type=one.type, cap=one.cap, markets=one.markets)
                for one in place.machines
            ),
            rows=None,
            server=place.server,
            disk=None,
            disk_gb=0.0,
        )
        for name, place in stack.places.items()
    }


def inventory_tree(stack: TerraformStack) -> dict[str, JSONValue]:
    """Return the sections `cluster`, `run` and `plan` that the stack knows, without defaults."""
    regions: dict[str, JSONValue] = {
        name: offer.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for name, offer in offers_of(stack).items()
    }
    return {
        "cluster": {"kind": "existing", "address": stack.head.address},
        "run": {"dir": stack.runs},
        "plan": {"regions": regions},
    }


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
