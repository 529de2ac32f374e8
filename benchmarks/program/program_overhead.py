"""What a call of a program's node costs over the same code called directly.

A node that gives back what it is given, called by another one of its region: 8 bytes, and an array
of 1 MiB (there and back), one call at a time; and 16 calls of 8 bytes at once by futures.

  call_s_threads, call_s_processes, call_s_ray     seconds of a call, median
  mib_s_*, futures_s_*                             the same with 1 MiB; per call of 16 at once
  *_direct                                         the method itself
  *_grpc                                           like Launchpad's Courier: gRPC, pickled
  *_pipe                                           multiprocessing's pipe, pickled
  *_ray_actor                                      an actor of plain Ray, called by another one
  start_s_*                                        a whole program of two nodes and few calls
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections import defaultdict
from typing import Any

import ray

from benchmarks.common import support
from benchmarks.program import nodes
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.program.graph import NodeGroup, Program, ProgramNode
from geo_ray.program.run import On, run_program
from geo_ray.ray_cluster.connect import connect


def program(calls: int) -> Program:
    echo = ProgramNode("echo", nodes.Echo)
    caller = ProgramNode("caller", nodes.Caller, (echo.handle, calls))
    return Program("overhead", (NodeGroup("eu", (echo, caller), cpus=0.5),))


def beside(serve: Any, call_by: Any, calls: int) -> dict[str, float]:
    """Time calls of a server in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        return nodes.timed(call_by(ours), calls)
    finally:
        process.kill()
        process.join()


def by_grpc(pipe: Any) -> Any:
    import grpc  # type: ignore[import-untyped]

    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{pipe.recv()}", options=limits)
    call = channel.unary_unary("/courier/Call")
    return lambda value: pickle.loads(call(pickle.dumps(("same", (value,)))))  # noqa: S301


def by_pipe(pipe: Any) -> Any:
    def call(value: Any) -> Any:
        pipe.send(("same", (value,)))
        return pipe.recv()

    return call


class PlainCaller:
    """Calls an actor of plain Ray."""

    def measure(self, echo: Any, calls: int) -> dict[str, float]:
        """See `nodes.timed`."""
        return nodes.timed(lambda value: ray.get(echo.same.remote(value)), calls)


def by_ray_actor(calls: int) -> dict[str, float]:
    echo: Any = ray.remote(nodes.Echo).options(num_cpus=0.5).remote()
    caller: Any = ray.remote(PlainCaller).options(num_cpus=0.5).remote()
    return dict(ray.get(caller.measure.remote(echo, calls)))


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    calls, rounds = (200, 1) if options.quick else (500, 3)
    seconds: dict[str, list[float]] = defaultdict(list)

    def note(way: str, found: dict[str, float]) -> None:
        for name, value in found.items():
            seconds[f"{name}_s_{way}".replace("small", "call")].append(value)

    def measured(way: On) -> None:
        note(way, run_program(program(calls), way).values["caller"])
        began_s = time.perf_counter()
        run_program(program(16), way)
        seconds[f"start_s_{way}"].append(time.perf_counter() - began_s)

    cluster = LocalClusterConfig(cpus_per_region=4)
    with connect(cluster, ["eu"], namespace="overhead"):
        for number in range(rounds):
            support.say(f"round {number + 1} of {rounds}")
            note("direct", nodes.timed(nodes.Echo().same, calls))
            measured("threads")
            measured("processes")
            measured("ray")
            note("grpc", beside(nodes.serve_grpc, by_grpc, calls))
            note("pipe", beside(nodes.serve_pipe, by_pipe, calls))
            note("ray_actor", by_ray_actor(calls))
    figures = [support.median(name, runs, "s") for name, runs in sorted(seconds.items())]
    for way in ("threads", "processes", "ray"):
        for than in ("grpc", "ray_actor"):
            name = f"call_{way}_over_{than}"
            figures.append(support.ratio(name, seconds[f"call_s_{way}"], seconds[f"call_s_{than}"]))
    support.finish("program_overhead", machine, figures, options.out)


if __name__ == "__main__":
    main()
