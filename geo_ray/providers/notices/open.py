"""Opens the reader of notices of a cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.notices.aws import AWS_METADATA, AwsNotices
from geo_ray.providers.notices.base import NoticeReader
from geo_ray.providers.notices.local import FileNotices
from geo_ray.providers.notices.tencent import TENCENT_METADATA, TencentNotices

CLOUDS: Final = ("aws", "tencent", "local")


def open_notices(cloud: str, url: str | None = None, file: Path | None = None) -> NoticeReader:
    """Return the reader.

    Args:
        cloud: one of `CLOUDS`.
        url: of the metadata service, in place of the cloud's.
        file: of the local cloud's notice.

    Raises:
        ProviderRefusedError: there is no such cloud, or the local one's file is not named.
    """
    if cloud == "aws":
        return AwsNotices(url or AWS_METADATA)
    if cloud == "tencent":
        return TencentNotices(url or TENCENT_METADATA)
    if cloud == "local" and file is not None:
        return FileNotices(file)
    raise ProviderRefusedError(
        f"no notices can be read of {cloud}", fix=f"Use one of {', '.join(CLOUDS)}; local: --file."
    )
