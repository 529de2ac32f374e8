"""Errors of the WAN lab (exit code 9)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class LabError(GeoRayError):
    """The WAN lab does not come up, or is used while it is not up."""

    code = "LAB"
    exit_code = 9
    chapter = "WAN lab"
    causes = "The kernel refuses a namespace, a device or a setting; the relay's process ended."
    advice = "Read the message; `geo-ray lab down` removes what a crashed lab has left."


class LabUnavailableError(LabError):
    """This machine, or this user, cannot have a WAN lab."""

    code = "LAB_UNAVAILABLE"
    causes = (
        "Not root, no `/dev/net/tun`, no `ip` or `nsenter`, another system than Linux, or a "
        "congestion control that the kernel lacks."
    )
    advice = "Run as root on Linux with /dev/net/tun; without, `emulate:` shapes a run's own links."
    more = "A container needs `--privileged --device /dev/net/tun`."


class LabUnknownError(LabError):
    """A command is meant for a lab that is not up, or several are up and none is named."""

    code = "LAB_UNKNOWN"
    causes = "The lab was taken down, another id, two labs at the same time."
    advice = "`geo-ray lab status` lists the labs that are up; name one with --lab."


class LabDownError(LabError):
    """The relay of the lab does not answer any more."""

    code = "LAB_DOWN"
    causes = "Its process was ended, or the machine is so loaded that it gets no time."
    advice = "Remove what is left with `geo-ray lab down`, then bring the lab up again."


class LabLateError(LabError):
    """Packets were forwarded later than the links' round trips allow (docs/lab.md has the rule).

    What was measured meanwhile says more about the machine than about the links, and is
    rejected.
    """

    code = "LAB_LATE"
    causes = (
        "Too few cores for the relay and what runs in the lab, a host that gives the machine's "
        "cores to others (stolen time), or rates beyond what the relay carries (docs/lab.md). "
        "The message says what the relay did itself and what the kernel counted."
    )
    advice = (
        "Leave the relay a core, lower the rates or the number of regions, and measure again; "
        "where cycles are stolen, repeat the run."
    )
