"""Errors of a configuration (exit code 2)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class ConfigError(GeoRayError):
    """A configuration cannot be used.

    Nothing was started, rented or written.
    """

    code = "CONFIG_INVALID"
    exit_code = 2
    chapter = "Configuration"
    causes = (
        "An unknown or misspelt key, a wrong type, a number out of its range, a missing value, two "
        "keys that contradict each other, a duplicate key, YAML that is broken or that uses tags, "
        "anchors, NaN or infinities, a `--set` that is not `key.key=value`, a file that is absent, "
        "larger than 1 MB or not UTF-8."
    )
    advice = "Correct what the message names; `geo-ray config schema KEY` shows what a key takes."
    more = (
        "The message lists every problem at once: the key's path, its line (or `--set`), what is "
        "there, what is expected and the nearest valid key or value. `geo-ray config schema` lists "
        "every key. Numbers such as `1e-3` may be written bare; `no`, `on` and `12:30` are text, "
        "as in YAML 1.2."
    )
