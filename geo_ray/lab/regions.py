"""Makes the regions' namespaces and configures them for TCP over long links."""

from __future__ import annotations

from typing import Final

from geo_ray.lab import host, namespace, requirements
from geo_ray.lab.relay.plan import DEVICE, LabPlan, ipv4_of, ipv6_of

_TCP_BUFFERS: Final = "4096 131072 67108864"  # the usual 4 MB would limit long links
_DEVICE_QUEUE: Final = 20_000  # packets; only links may drop packets, never the device


def make(plan: LabPlan) -> None:
    """Make the namespaces of all regions.

    Raises:
        OSError: the system refuses.
    """
    namespace.ip_batch([f"netns add {station.namespace}" for station in plan.stations])


def configure(plan: LabPlan) -> None:
    """Set addresses, routes and TCP of all regions; their devices must exist.

    Raises:
        OSError: the system refuses.
        LabUnavailableError: the kernel lacks a congestion control.
    """
    with host.allowed({station.congestion_control for station in plan.stations}):
        for station in plan.stations:
            namespace.write_settings(
                station.namespace,
                {
                    "ipv4/tcp_congestion_control": station.congestion_control,
                    "ipv4/tcp_wmem": _TCP_BUFFERS,
                    "ipv4/tcp_rmem": _TCP_BUFFERS,
                    "ipv4/tcp_no_metrics_save": "1",  # no connection learns from earlier ones
                },
            )
    for index, station in enumerate(plan.stations):
        lines = [
            "link set lo up",
            f"addr add {ipv4_of(index)}/32 dev {DEVICE}",
            f"link set {DEVICE} mtu {plan.mtu} txqueuelen {_DEVICE_QUEUE} up",
            f"route replace default dev {DEVICE} src {ipv4_of(index)}",
        ]
        if requirements.has_ipv6():
            lines += [
                f"addr add {ipv6_of(index)}/128 dev {DEVICE} nodad",
                f"route replace ::/0 dev {DEVICE} src {ipv6_of(index)}",
            ]
        namespace.ip_batch(lines, station.namespace)


def congestion_control(name: str) -> str:
    """Return the congestion control that the kernel uses in a namespace."""
    return namespace.read_setting(name, "ipv4/tcp_congestion_control")
