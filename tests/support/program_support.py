"""Nodes and programs that tests run in all ways; other processes import this module, too."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from geo_ray.base.errors import GeoRayError
from geo_ray.program.calls import batched_handler, gathered
from geo_ray.program.clock import here
from geo_ray.program.graph import NodeGroup, NodeRestarts, Program, ProgramNode, load_program
from geo_ray.transport.emulation import LinkSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "program.py"
MEANS = [1.499912, 1.498753, 1.50352, 1.506031, 1.490705, 1.490995, 1.50011, 1.488165]
"""What it returns."""

LINK = LinkSpec(rate_mbps=100, delay_s=0.02)


class Echo:
    """Answers calls in several ways, good and bad."""

    def __init__(self, name: str = "echo") -> None:
        self._name = name

    def same(self, value: Any) -> Any:
        return value

    def named(self, *, word: str) -> str:
        return f"{self._name} {word}"

    def who(self) -> tuple[str, str, int]:
        at = here()
        return at.name, at.region, at.replica

    def broken(self, word: str) -> None:
        raise KeyError(word)

    def odd(self) -> object:
        return {1, 2}

    def die(self) -> None:
        os._exit(3)

    @batched_handler(4, 5.0)
    def sizes(self, requests: list[int]) -> list[tuple[int, int]]:
        return [(len(requests), each * 10) for each in requests]

    @batched_handler(2, 5.0)
    def too_few(self, requests: list[int]) -> list[int]:
        return requests[:0]

    @batched_handler(8, 0.05)
    def late(self, requests: list[int]) -> list[int]:
        return [len(requests)] * len(requests)

    def _hidden(self) -> None: ...


class Counter:
    """Counts, so that a restarted node can detect the restart."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


class Flaky:
    """Fails in its first runs."""

    def __init__(self, counter: Any, failures: int) -> None:
        self._counter, self._failures = counter, failures

    def run(self) -> int:
        count: int = self._counter.add()
        if count <= self._failures:
            raise RuntimeError(f"run {count} of a flaky node")
        return count


class Unmade:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no such luck")


class Returns:
    """Returns what it is given."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def run(self) -> Any:
        return self._value


def told(call: Any, *given: Any, **named: Any) -> str:
    """The code and first line of the error of a call."""
    try:
        return f"no error: {call(*given, **named)!r}"
    except GeoRayError as error:
        return f"{error.code} {error.message.splitlines()[0]}"


class Battery:
    """Calls others in every way, and returns what it saw."""

    def __init__(self, near: Any, far: Any, more: dict[str, Any]) -> None:
        self.near, self.far, self.counter = near, far, more["counter"][0]

    def run(self) -> dict[str, Any]:
        import torch  # not above: each process of a program imports this module

        near, far = self.near, self.far
        array, tensor = np.arange(6, dtype=np.int16).reshape(2, 3), torch.ones(2, 2).bfloat16()
        plain = {"a": [1, 2.5, None, True], 3: (b"x", "ü", {"deep": ()})}
        asked = [far.futures.sizes(number) for number in range(4)]
        back = far.same([array, tensor, np.float32(1.5)])
        both = [far.futures.too_few(number) for number in range(2)]
        return {
            "plain": near.same(plain) == plain and type(near.same((1,))) is tuple,
            "arrays": bool(np.array_equal(back[0], array)) and back[0].dtype == np.int16,
            "tensors": bool(torch.equal(back[1], tensor)) and str(back[1].dtype),
            "scalars": type(back[2]).__name__,
            "named": [near.named(word="hello"), far.named(word="there")],
            "turns": [near.who() for _ in range(4)],
            "each": [each.who()[2] for each in near.each],
            "batch": gathered(asked),
            "late": far.late(1),
            "too few": [told(future.result) for future in both],
            "raises": [told(near.broken, "word"), told(far.broken, "word")],
            "missing": told(far.sane, 1),
            "hidden": [told(near.run), told(far.same)],
            "result": told(far.odd),
            "argument": told(near.same, {1, 2}),
            "futures": [future.done() or future.result() for future in [near.futures.same(0)]],
            "counts": [self.counter.add() for _ in range(3)],
        }


BATTERY = {
    "plain": True,
    "arrays": True,
    "tensors": "torch.bfloat16",
    "scalars": "float32",
    "named": ["near hello", "far there"],
    "turns": [("near/1", "us", 1), ("near/0", "us", 0)] * 2,
    "each": [0, 1],
    "batch": [(4, 0), (4, 10), (4, 20), (4, 30)],
    "late": 1,
    "too few": ["NODE_CALL far.too_few failed: TypeError('a batched handler was given 2 requests "
                "and returned [] instead of a list of as many')"] * 2,
    "raises": ["NODE_CALL near/1.broken failed: KeyError('word')",
               "NODE_CALL far.broken failed: KeyError('word')"],
    "missing": "NODE_CALL node 'far' has no public method 'sane'; did you mean 'same'?",
    "hidden": ["NODE_CALL node 'near/0' has no public method 'run'; valid: broken, die, "
               "late, named, odd, same, sizes, too_few, who",
               "NODE_CALL far.same failed: TypeError(\"Echo.same() missing 1 required positional "
               "argument: 'value'\")"],
    "result": "VALUE_UNSHIPPABLE the result of far.odd: a value cannot be sent: builtins.set is "
              "not a plain value",
    "argument": "VALUE_UNSHIPPABLE an argument of near/1.same: a value cannot be sent: "
                "builtins.set is not a plain value",
    "futures": [0],
    "counts": [1, 2, 3],
}  # fmt: skip


def battery() -> Program:
    """A program that calls in every way, inside a region and across."""
    near, far = ProgramNode("near", Echo, ("near",)), ProgramNode("far", Echo, ("far",))
    counter, flaky = ProgramNode("counter", Counter), ProgramNode("ticks", Counter)
    more = {"counter": [counter.handle]}
    caller = ProgramNode("caller", Battery, (near.handle, far.handle, more))
    again = ProgramNode("flaky", Flaky, (flaky.handle, 1))
    return Program(
        "battery",
        (
            NodeGroup("us", (near,), replicas=2, cpus=0.1),
            NodeGroup("eu", (far, counter), cpus=0.1, calls_at_once=2),
            NodeGroup("us", (flaky, caller), cpus=0.1),
            NodeGroup("us", (again,), cpus=0.1, restarts=NodeRestarts(1)),
        ),
        links={("us", "eu"): LINK},
    )


def example() -> Program:
    """The one that users read."""
    return load_program(str(EXAMPLE))


def alone(*nodes: ProgramNode, restarts: int = 0) -> Program:
    """Nodes in one region."""
    return Program("alone", (NodeGroup("eu", nodes, cpus=0.1, restarts=NodeRestarts(restarts)),))


def flaky(failures: int, restarts: int) -> Program:
    """A node whose first runs fail, and one that counts them."""
    counter = ProgramNode("counter", Counter)
    return alone(
        counter, ProgramNode("flaky", Flaky, (counter.handle, failures)), restarts=restarts
    )


class Survivor:
    """Calls a node that dies while it answers, and again."""

    def __init__(self, mortal: Any) -> None:
        self._mortal = mortal

    def run(self) -> list[str]:
        return [told(self._mortal.die), told(self._mortal.same, "back")]


class Hasty:
    """Is not made yet when the node that it calls dies."""

    def __init__(self, mortal: Any) -> None:
        self._told = Survivor(mortal).run()

    def run(self) -> list[str]:
        return self._told


class Done(Echo):
    """Has returned long before it dies."""

    def run(self) -> str:
        return "done"


def mortal(
    restarts: int, region: str = "eu", victim: type = Echo, caller: type = Survivor
) -> Program:
    """A node that dies while it is called, from another region if that is named."""
    called = ProgramNode("victim", victim)
    user = ProgramNode("caller", caller, (called.handle,))
    return Program(
        "mortal",
        (
            NodeGroup(region, (called,), cpus=0.1, restarts=NodeRestarts(restarts)),
            NodeGroup("eu", (user,), cpus=0.1),
        ),
    )


def kill_started(numbers: Container[int]) -> None:
    """Kill those of this program's processes that were started as such."""
    orders = {str(Path(sys.argv[1]).with_name(f"{n}.order")) for n in range(100) if n in numbers}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # others come and go
            if entry.name.isdigit() and orders & {*(entry / "cmdline").read_text().split("\0")}:
                os.kill(int(entry.name), signal.SIGKILL)


class Fury:
    """Kills a bridge again and again, while it is called."""

    def __init__(self, far: Any) -> None:
        self._far = far

    def run(self) -> None:
        self._far.same(1)
        while True:
            kill_started({1, *range(5, 100)})  # between them: the other bridge, and two nodes
            time.sleep(0.05)


class Wrecker:
    """Kills a bridge, and calls over it again."""

    def __init__(self, far: Any) -> None:
        self._far = far

    def run(self) -> list[Any]:
        before = self._far.same(1)
        kill_started({1})  # bridges are started before nodes
        while (after := told(self._far.same, 2)).startswith("NODE_LOST"):
            pass
        return [before, after]


def wrecked(by: type = Wrecker) -> Program:
    """A program in which a bridge is killed."""
    far = ProgramNode("far", Echo)
    wrecker = ProgramNode("wrecker", by, (far.handle,))
    return Program("wrecked", (NodeGroup("eu", (far,)), NodeGroup("us", (wrecker,))))
