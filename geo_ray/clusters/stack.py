"""A cluster on what Terraform made: its head, networks, secrets and rights are the stack's; pure.

The autoscaler then owns the counts, and Terraform the rest.
"""

from __future__ import annotations

from typing import Final

from geo_ray.clusters.record import HeadRecord, StandingHead
from geo_ray.errors import ConfigError
from geo_ray.planning.config import PlanConfig
from geo_ray.providers.base import Market, Pool
from geo_ray.providers.config import ProviderConfig
from geo_ray.providers.terraform.configs import aws_config, tencent_config
from geo_ray.providers.terraform.outputs import TerraformStack

_DASHBOARD_PORT: Final = 8265


def check_on_stack(section: PlanConfig, stack: TerraformStack) -> None:
    """Hold a configuration against the stack that it is to run on.

    Raises:
        ConfigError: the stack's head serves no autoscaler, or a region is none that it could rent
            machines in.
    """
    if stack.clusters is None:
        raise ConfigError(
            f"the head of the stack {stack.stack} serves no autoscaler",
            fix="Apply it again with `rents=true`, which gives the head the right to rent; or let "
            "Terraform own the counts: `geo-ray plan --out-tfvars`.",
        )
    cloud = stack.places[stack.head.region].cloud
    for name, offer in section.regions.items():
        place = stack.places.get(name)
        if place is None:
            raise ConfigError(
                f"plan.regions.{name} is no region of the stack {stack.stack}, which has "
                f"{', '.join(stack.places)}",
                fix="Take the regions of `geo-ray inventory --from-terraform`.",
            )
        if (offer.cloud, offer.at) != (place.cloud, place.at):
            raise ConfigError(
                f"plan.regions.{name} is in {offer.at} of {offer.cloud}, and the stack "
                f"{stack.stack} has it in {place.at} of {place.cloud}",
                fix="Correct `cloud` and `at`, as `geo-ray inventory --from-terraform` has them.",
            )
        if place.cloud != cloud:
            raise ConfigError(
                f"plan.regions.{name} is in {place.cloud}, where the head's role, which is one of "
                f"{cloud}, may rent nothing",
                fix="Let Terraform own the counts of this stack: `geo-ray plan --out-tfvars`.",
            )
        kept = sum(pool.count for pool in place.pools.values())
        if kept:
            raise ConfigError(
                f"Terraform owns {kept} machines of {name}, and an autoscaler would not know of "
                "them",
                fix="Apply the stack without `workers`, or keep to Terraform's counts.",
            )


def provider_on_stack(provider: ProviderConfig, stack: TerraformStack) -> ProviderConfig:
    """Return the section `provider` with what the stack says in place of what it repeats.

    How clouds are asked (endpoints, tries, rates) stays as the configuration has it.
    """
    changes: dict[str, object] = {}
    aws, tencent = aws_config(stack), tencent_config(stack)
    if aws is not None:
        own = {"places": aws.places, "join": aws.join, "secret_store": aws.secret_store}
        changes["aws"] = aws if provider.aws is None else provider.aws.model_copy(update=own)
    if tencent is not None:
        held = provider.tencent
        there = {"places": tencent.places, "join": tencent.join}
        changes["tencent"] = tencent if held is None else held.model_copy(update=there)
    if stack.clusters is not None:
        changes["state"] = stack.clusters
    changes["state_keys_secret"] = stack.state_keys
    return provider.model_copy(update=changes)


def head_on_stack(stack: TerraformStack) -> HeadRecord:
    """Return the head of the stack, as a cluster's record has it."""
    place, head = stack.places[stack.head.region], stack.head
    return HeadRecord(
        cloud=place.cloud,
        pool=Pool(place.at, None, head.type or "", Market.ON_DEMAND),
        port=int(head.address.rpartition(":")[2]),
        dashboard_port=_DASHBOARD_PORT,
        is_known=True,
        standing=StandingHead(stack=stack.stack, machine=head.machine, address=head.address),
    )
