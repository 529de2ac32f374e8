"""Errors of clouds (exit code 11)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from geo_ray.errors.base import GeoRayError


class CloudError(GeoRayError):
    """A cloud refused a request, or its answer makes no sense."""

    said: str = ""
    """The cloud's own code of the refusal, if it sent one."""

    code = "CLOUD"
    exit_code = 11
    chapter = "Clouds"
    causes = "Wrong credentials, a region that is not enabled, a right that is missing."
    advice = "Read what the cloud said; credentials and regions are the usual causes."


class CloudUnreachableError(CloudError):
    """A cloud did not answer, or only asked to slow down, until the last try."""

    code = "CLOUD_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling."
    advice = "Try again later, or check the network and the endpoint."
    more = "Prices that were known stay as they were."


class ProviderRefusedError(CloudError):
    """A cloud will not do what was asked with machines or secrets, however often it is asked."""

    code = "PROVIDER_REFUSED"
    causes = (
        "Wrong or expired credentials, a missing permission, a machine image that is not there."
    )
    advice = "Give the account the permission that the message names; docs/providers.md lists all."


class ProviderUnreachableError(CloudUnreachableError):
    """Whether a cloud did what was asked with machines or secrets is not known."""

    code = "PROVIDER_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling, a time limit."
    advice = "Ask again with the same request id, which is safe; look at what the cloud lists."


class RegionsSilentError(ProviderUnreachableError):
    """Some of several regions did not answer; what the others said comes with it."""

    found: tuple[Any, ...] = ()
    """What the others said."""

    silent: Mapping[str, str] = MappingProxyType({})
    """Why each of the rest said nothing."""

    code = "REGIONS_SILENT"
    causes = (
        "A cloud or one of its regions that is down, no way to it, credentials that have ended."
    )
    advice = "See whether the region is up and its credentials are right, then ask again."
    more = "The autoscaler leaves such a region as it is, and goes on with all others."


class TerraformOutputsError(CloudError):
    """What Terraform made cannot be read from its outputs."""

    code = "TERRAFORM_OUTPUTS"
    causes = (
        "Nothing was applied there, another directory, outputs that were edited or are of another "
        "release, no program terraform."
    )
    advice = (
        "Name the directory of a stack of infra/terraform after `terraform apply`, or a file of "
        "`terraform output -json`."
    )
