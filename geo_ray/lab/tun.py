"""A TUN device: IP packets of one namespace as reads and writes of a file."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

from geo_ray.lab import namespace

TUN_FILE: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class Tun:
    """The relay's end of a region's only network device; gone when it is closed.

    Opened without offload headers, so that the kernel hands over packets of at most the MTU and
    loss strikes single packets, not aggregates of 64 KiB.

    Args:
        within: name of the namespace in which the device appears.
        device: its name there.

    Raises:
        OSError: no permission, or no such namespace.
    """

    def __init__(self, within: str, device: str) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            namespace.enter(within)
            try:
                self.file = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
                fcntl.ioctl(self.file, _TUNSETIFF, request)
            finally:
                namespace.setns(home)
        finally:
            os.close(home)

    def close(self) -> None:
        """Remove the device."""
        os.close(self.file)
