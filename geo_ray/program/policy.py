"""What is to happen with a program's instances. Pure: no clock, no thread, no process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum

from geo_ray.program.graph import Program
from geo_ray.program.node import handles_in, instance_names
from geo_ray.runtime.control.restarts import Restarts


class InstanceState(Enum):
    """What an instance does."""

    WAITING = "waiting"
    STARTING = "starting"
    STANDING = "standing"
    RETURNED = "returned"


class ProgramPolicy:
    """Starts instances once those stand that they call, restarts them, and knows the end.

    Args:
        program: the whole.
    """

    def __init__(self, program: Program) -> None:
        nodes = program.nodes
        self._callees: dict[str, frozenset[str]] = {}
        self._restarts: dict[str, Restarts] = {}
        self._states: dict[str, InstanceState] = {}
        self._runs: dict[str, bool] = {}
        self._made: Counter[str] = Counter()
        for instance in program.instances:
            named = [instance_names(*nodes[t]) for t in handles_in(instance.node.args)]
            self._callees[instance.name] = frozenset(name for names in named for name in names)
            rule = instance.group.restarts
            self._restarts[instance.name] = Restarts(rule.most, rule.window_s, "restarts.most")
            self._states[instance.name] = InstanceState.WAITING

    @property
    def incarnations(self) -> Mapping[str, int]:
        """How often each instance was started."""
        return self._made

    @property
    def is_over(self) -> bool:
        """Whether all stand, and every ``run`` has returned."""
        return all(
            state is InstanceState.RETURNED
            or (state is InstanceState.STANDING and not self._runs[name])
            for name, state in self._states.items()
        )

    def due(self) -> list[str]:
        """Instances to be started now; they count as started."""
        up = {InstanceState.STANDING, InstanceState.RETURNED}
        found = [
            name
            for name, state in self._states.items()
            if state is InstanceState.WAITING
            and all(self._states[callee] in up for callee in self._callees[name])
        ]
        for name in found:
            self._states[name] = InstanceState.STARTING
            self._made[name] += 1
        return found

    def stood(self, name: str, *, runs: bool) -> None:
        """An instance is made; ``runs`` says whether it has something to do of its own."""
        self._states[name] = InstanceState.STANDING
        self._runs[name] = runs

    def returned(self, name: str) -> None:
        """An instance's ``run`` has returned; it goes on answering calls."""
        self._states[name] = InstanceState.RETURNED

    def failed(self, name: str, now_s: float) -> bool:
        """An instance failed; whether it may be started anew, and then it is due."""
        may = self._restarts[name].take(now_s)
        if may:
            self._states[name] = InstanceState.WAITING
        return may

    def limit(self, name: str) -> str:
        """How often an instance may be started anew, in words."""
        return str(self._restarts[name])
