"""What could be rented, as sections of a configuration, from what Terraform made; pure."""

from __future__ import annotations

from geo_ray.config.canonical import JSONValue
from geo_ray.planning.config import MachineConfig, RegionOffer
from geo_ray.providers.terraform.outputs import TerraformStack


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
