"""Runs a program, in one of four ways."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from geo_ray.config.cluster import ClusterConfig
from geo_ray.errors import ProgramError
from geo_ray.program.apart.crew import ApartCrew, NodeMaker
from geo_ray.program.apart.processes import LocalProcesses
from geo_ray.program.apart.shipped import check_not_importing
from geo_ray.program.clock import RealClock
from geo_ray.program.controller import carry_out
from geo_ray.program.graph import Program
from geo_ray.program.local import LocalCrew
from geo_ray.program.result import ProgramResult
from geo_ray.program.virtual_clock import VirtualThreads
from geo_ray.util.user_class import or_meant

On = Literal["threads", "processes", "ray", "virtual"]
WAYS: Final = ("threads", "processes", "ray", "virtual")


def run_program(
    program: Program,
    on: On = "threads",
    *,
    cluster: ClusterConfig | None = None,
    logs: Path | None = None,
) -> ProgramResult:
    """Run a program to its end; nothing of it is left afterwards, however it ends.

    Args:
        program: the whole.
        on: ``threads`` of this process, ``processes`` of this machine, ``ray``, or ``virtual``: in
            this process, on a virtual clock on which only links and `NodeSurroundings.takes_s`
            take time.
        cluster: for ``ray``; None: the cluster that this process is connected to or runs in, else
            one that is made on this machine.
        logs: for ``processes``; a directory that gets what each of them wrote.

    Raises:
        NodeFailedError: a node failed more often than its group allows.
        GeoRayError: whatever keeps it from being started.
    """
    check_not_importing()
    if on == "threads":
        real = RealClock()
        return real.run(lambda: carry_out(program, LocalCrew(program, real, on), real, on))
    if on == "virtual":
        virtual = VirtualThreads()
        crew = LocalCrew(program, virtual, on)
        return virtual.run(lambda: carry_out(program, crew, virtual, on))
    if on in ("processes", "ray"):
        real = RealClock()
        apart = ApartCrew(program, _maker(program, on, cluster, logs), real)
        return real.run(lambda: carry_out(program, apart, real, on))
    raise ProgramError(f"a program cannot run on {on!r}{or_meant(on, WAYS)}")


def _maker(
    program: Program, on: str, cluster: ClusterConfig | None, logs: Path | None
) -> NodeMaker:
    if on == "processes":
        return LocalProcesses(program, logs)
    from geo_ray.program.on_ray import RayActors  # Ray takes a second to import

    return RayActors(program, cluster)
