"""Changes the one host setting that a lab needs, for milliseconds and under a lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from geo_ray.errors import LabUnavailableError
from geo_ray.lab.records import locked

_TCP = Path("/proc/sys/net/ipv4")
_ALLOWED = _TCP / "tcp_allowed_congestion_control"
_AVAILABLE = _TCP / "tcp_available_congestion_control"


@contextmanager
def allowed(wanted: Iterable[str]) -> Iterator[None]:
    """Let namespaces choose these congestion controls while the block runs.

    A namespace may only choose what the host's ``tcp_allowed_congestion_control`` names; once
    chosen it stays chosen, so the host's list is put back at once.

    Raises:
        LabUnavailableError: the kernel has none of that name.
    """
    needed = set(wanted)
    with locked():
        before = _ALLOWED.read_text().split()
        missing = needed - set(_AVAILABLE.read_text().split())
        if missing:
            raise LabUnavailableError(
                f"the kernel lacks the congestion control {', '.join(sorted(missing))}",
                fix="Load it (`modprobe tcp_bbr`), or choose another `congestion_control`.",
            )
        added = needed - set(before)
        if added:
            _ALLOWED.write_text(" ".join([*before, *sorted(added)]))
        try:
            yield
        finally:
            if added:
                _ALLOWED.write_text(" ".join(before))
