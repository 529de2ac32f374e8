"""From a stack to the providers that rent machines beside what Terraform made; pure."""

from __future__ import annotations

from geo_ray.providers.aws.config import AwsProviderConfig
from geo_ray.providers.tencent.config import TencentProviderConfig
from geo_ray.providers.terraform.outputs import TerraformSecrets, TerraformStack
from geo_ray.providers.user_data import NodeJoin


def aws_config(stack: TerraformStack) -> AwsProviderConfig | None:
    """Return how machines of AWS are rented; None if the stack is not there."""
    places = {one.at: one.aws for one in stack.places.values() if one.aws is not None}
    secrets = stack.secrets.aws
    if not places or secrets is None:
        return None
    join = _join(stack, secrets)
    return AwsProviderConfig(places=places, join=join, secret_store=secrets.store)


def tencent_config(stack: TerraformStack) -> TencentProviderConfig | None:
    """Return how machines of Tencent Cloud are rented; None if the stack is not there."""
    places = {one.at: one.tencent for one in stack.places.values() if one.tencent is not None}
    secrets = stack.secrets.tencent
    if not places or secrets is None:
        return None
    return TencentProviderConfig(places=places, join=_join(stack, secrets))


def _join(stack: TerraformStack, secrets: TerraformSecrets) -> NodeJoin:
    return NodeJoin(
        address=stack.head.address,
        token_secret=secrets.token,
        tls_certificate_secret=secrets.tls_certificate,
        tls_key_secret=secrets.tls_key,
        tls_ca_secret=secrets.tls_ca,
        secrets_region=secrets.region,
    )
