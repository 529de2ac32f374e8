"""Calls to Tencent Cloud: bounded, retried when it throttles, with typed errors.

Credentials come only from the SDK's places: TENCENTCLOUD_SECRET_ID and TENCENTCLOUD_SECRET_KEY
(and TENCENTCLOUD_TOKEN), or ``~/.tencentcloud/credentials``. The machine's role is used only where
GEO_RAY_TENCENT_METADATA says so: elsewhere the SDK would wait for it without bound.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import os
import random
import time
from configparser import Error as ConfigParserError
from typing import Any, Final
from urllib.parse import urlsplit

from geo_ray.clouds.replies import making_sense, quoted
from geo_ray.clouds.tencent.role import METADATA_VARIABLE, role_credentials
from geo_ray.errors import CloudError, CloudUnreachableError

CREDENTIALS_FIX: Final = (
    "Set TENCENTCLOUD_SECRET_ID and TENCENTCLOUD_SECRET_KEY, or write ~/.tencentcloud/credentials."
)

_VERSIONS: Final = {"cvm": "2017-03-12", "ssm": "2019-09-23"}
SLOW_DOWN: Final = "RequestLimitExceeded"
_AGAIN: Final = ("ClientNetworkError", "ServerNetworkError", "InternalError", "InternalServerError")


class Tencent:
    """An account of Tencent Cloud.

    Args:
        endpoint: address in place of Tencent's, or None.
        attempts: tries per request, the first included.
        pause_s: before the second try; doubles, with jitter.
        timeout_s: bound on connecting, and on each wait for bytes.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        attempts: int = 5,
        pause_s: float = 1.0,
        timeout_s: float = 20.0,
    ) -> None:
        self._endpoint = urlsplit(endpoint) if endpoint else None
        self._attempts = attempts
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._credential = _credential()

    def call(
        self, region: str, action: str, parameters: dict[str, Any], product: str = "cvm"
    ) -> dict[str, Any]:
        """Call one action and return its answer.

        Raises:
            CloudUnreachableError: it did not answer, or asked to slow down until the last try.
            CloudError: it refused, or its answer makes no sense.
        """
        for attempt in range(1, self._attempts):
            try:
                return self._once(region, action, parameters, product)
            except CloudUnreachableError:
                time.sleep(self._pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        return self._once(region, action, parameters, product)

    def _once(
        self, region: str, action: str, parameters: dict[str, Any], product: str
    ) -> dict[str, Any]:
        from tencentcloud.common.exception.tencent_cloud_sdk_exception import (
            TencentCloudSDKException,
        )

        place = f"tencent {action} in {region}"
        try:
            with making_sense(place):
                # The SDK looks for errors only in replies of two content types; this looks in all.
                reply = self._client(region, product).call_json(action, parameters)["Response"]
                error = reply.get("Error")
                if error is None:
                    return dict(reply)
                code, text = error["Code"], error["Message"]
        except TencentCloudSDKException as error:
            code, text = error.get_code(), error.get_message()
        except OSError as error:  # the SDK does not wrap the error of a body that broke off
            code, text = "ClientNetworkError", type(error).__name__
        raise self._refusal(place, str(code), str(text))

    def _client(self, region: str, product: str) -> Any:
        """Return a client of a region; it keeps no connection open after its end."""
        from tencentcloud.common.common_client import CommonClient
        from tencentcloud.common.profile.client_profile import ClientProfile
        from tencentcloud.common.profile.http_profile import HttpProfile

        there = self._endpoint
        http = HttpProfile(
            protocol=there.scheme if there else "https",
            endpoint=there.netloc if there else None,
            reqTimeout=self._timeout_s,
        )
        profile = ClientProfile(httpProfile=http, language="en-US")
        return CommonClient(product, _VERSIONS[product], self._credential, region, profile)

    def _refusal(self, place: str, code: str, text: str) -> CloudError:
        known = self._credential.get_credential_info()
        code, text = quoted(code, known), quoted(text, known)
        if code.startswith(SLOW_DOWN):
            text = f"{place}: asked to slow down until the last try: {code}"
            found: CloudError = CloudUnreachableError(text)
        elif code == "ClientNetworkError":  # the error's text quotes the connection's internals
            found = CloudUnreachableError(f"{place}: no answer until the last try")
        elif code in _AGAIN:
            found = CloudUnreachableError(f"{place}: failed until the last try: {code}: {text}")
        else:
            found = CloudError(f"{place} refused: {code}: {text}")
        found.said = code
        return found


def _credential() -> Any:
    from tencentcloud.common.credential import Credential, ProfileCredential
    from tencentcloud.common.exception.tencent_cloud_sdk_exception import TencentCloudSDKException

    id_ = os.environ.get("TENCENTCLOUD_SECRET_ID")
    key = os.environ.get("TENCENTCLOUD_SECRET_KEY")
    try:
        if metadata := os.environ.get(METADATA_VARIABLE):
            return Credential(*role_credentials(metadata))
        if id_ and key:
            return Credential(id_, key, os.environ.get("TENCENTCLOUD_TOKEN"))
        found = ProfileCredential().get_credential()
    except (TencentCloudSDKException, OSError, AttributeError, ValueError, ConfigParserError):
        found = None  # the SDK's text is left out, it may repeat what it read
    if found is None:
        raise CloudError("there are no credentials of Tencent Cloud", fix=CREDENTIALS_FIX)
    return found
