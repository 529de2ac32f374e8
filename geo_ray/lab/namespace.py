"""Network namespaces and TUN devices: make, enter, configure, remove.

Needs root. Standard library only, because the relay's process imports it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000

T = TypeVar("T")


def path_of(namespace: str) -> Path:
    """Return the file by which a named namespace is entered."""
    return NAMESPACES / namespace


def ip_batch(lines: Iterable[str], namespace: str | None = None) -> None:
    """Run lines of `ip` in one process.

    Raises:
        OSError: naming the line and what `ip` says.
    """
    within = [] if namespace is None else ["-n", namespace]
    text = "\n".join(lines)
    done = subprocess.run(
        ["ip", *within, "-batch", "-"], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(within)}: {done.stderr.strip()} in: {text!r}")


def inside(namespace: str, action: Callable[[], T]) -> T:
    """Call ``action`` in a thread that has entered a namespace, to which its sockets then belong.

    Args:
        namespace: its name.
        action: function that must not start threads for another namespace.

    Returns:
        What ``action`` returns; what it raises is raised.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            result.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"in-{namespace}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace.

    Raises:
        OSError: the namespace does not exist, or this process may not enter it.
    """
    file = os.open(path_of(namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(file)
    finally:
        os.close(file)


def setns(file: int) -> None:
    """Move the calling thread into the namespace that an open file stands for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def write_settings(namespace: str, settings: Mapping[str, str]) -> None:
    """Set kernel settings of a namespace.

    Args:
        namespace: its name.
        settings: values by path below /proc/sys/net.

    Raises:
        OSError: naming the setting that the kernel refuses.
    """

    def write() -> None:
        for name, value in settings.items():
            try:
                (Path("/proc/sys/net") / name).write_text(value)
            except OSError as error:
                raise OSError(error.errno, f"net/{name} = {value}: {error.strerror}") from error

    inside(namespace, write)


def read_setting(namespace: str, name: str) -> str:
    """Read a kernel setting of a namespace; ``name`` is a path below /proc/sys/net."""
    return inside(namespace, (Path("/proc/sys/net") / name).read_text).strip()


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
            enter(within)
            try:
                self.file = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
                fcntl.ioctl(self.file, _TUNSETIFF, request)
            finally:
                setns(home)
        finally:
            os.close(home)

    def close(self) -> None:
        """Remove the device."""
        os.close(self.file)
