"""Runs a program, in one of four ways."""

from __future__ import annotations

from typing import Final, Literal

from geo_ray.errors import ProgramError
from geo_ray.program.apart.crew import ApartCrew
from geo_ray.program.apart.processes import LocalProcesses
from geo_ray.program.clock import RealClock
from geo_ray.program.controller import carry_out
from geo_ray.program.graph import Program
from geo_ray.program.local import LocalCrew
from geo_ray.program.result import ProgramResult
from geo_ray.program.virtual_clock import VirtualThreads
from geo_ray.util.user_class import or_meant

On = Literal["threads", "processes", "ray", "virtual"]
WAYS: Final = ("threads", "processes", "ray", "virtual")


def run(program: Program, on: On = "threads") -> ProgramResult:
    """Run a program to its end.

    Args:
        program: the whole.
        on: ``threads`` of this process, ``processes`` of this machine, ``ray``, or ``virtual``: in
            this process, on a virtual clock on which only links and `NodeSurroundings.takes_s`
            take time.

    Raises:
        NodeFailedError: a node failed more often than its group allows.
        GeoRayError: whatever keeps it from being started.
    """
    if on == "threads":
        real = RealClock()
        return real.run(lambda: carry_out(program, LocalCrew(program, real, on), real, on))
    if on == "virtual":
        virtual = VirtualThreads()
        crew = LocalCrew(program, virtual, on)
        return virtual.run(lambda: carry_out(program, crew, virtual, on))
    if on == "processes":
        real = RealClock()
        apart = ApartCrew(program, LocalProcesses(program), real)
        return real.run(lambda: carry_out(program, apart, real, on))
    raise ProgramError(f"a program cannot run on {on!r}{or_meant(on, WAYS)}")
