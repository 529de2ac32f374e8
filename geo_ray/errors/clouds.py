"""Errors of clouds (exit code 11)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class CloudError(GeoRayError):
    """A cloud refused a request, or its answer makes no sense."""

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
