"""The requirements of a lab, checked before anything is made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from geo_ray.errors import LabUnavailableError
from geo_ray.lab.tun import TUN_FILE

_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux"}


def lacking() -> str | None:
    """Return why this machine or user cannot have a lab; None if they can."""
    if not sys.platform.startswith("linux"):
        return "the WAN lab needs Linux"
    if os.geteuid() != 0:
        return "the WAN lab needs root: it makes network namespaces and TUN devices"
    try:
        os.close(os.open(TUN_FILE, os.O_RDWR))
    except OSError as error:
        return f"the WAN lab needs {TUN_FILE}: {error.strerror}"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"the WAN lab needs the program `{program}` (package {package})"
    return None


def check() -> None:
    """Check the requirements.

    Raises:
        LabUnavailableError: something is missing, which the message names.
    """
    reason = lacking()
    if reason is not None:
        raise LabUnavailableError(reason)


def has_ipv6() -> bool:
    """Return whether this kernel has IPv6."""
    return Path("/proc/sys/net/ipv6").is_dir()
