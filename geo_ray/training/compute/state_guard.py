"""Finds values of a model that change although nobody said so, and such that differ elsewhere.

What is neither trained nor carried must stay as it is: it is in no exchange and no checkpoint. Its
digests are compared at the start with those of other processes, and after a worker's steps: the
first ones, where a change ends a run that has just begun before it has cost anything, then those
whose number is a power of two, and before every evaluation. What begins to change late (an average
from step 100 on, a queue that fills at an epoch's end), or is found by a worker that came late
(after a resume, as a replacement), is told once and ends nothing: the run of hours before it
stands. A look reads all of that state once, so a run of N steps pays for log2(N) looks and one per
evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from geo_ray.errors import TaskStateError
from geo_ray.tasks.carry import is_scratch, rules_of, state_of

WATCHED_STEPS: Final = 3
"""First steps of a run, and of a worker, in which a change of its model's values is an error."""

_MOST_NAMED: Final = 6


class StateGuard:
    """Watches over one replica.

    Attributes:
        constants: see `constants_of`.

    Args:
        task: whose model it is.
        module: the replica, as it was made.
    """

    def __init__(self, task: object, module: nn.Module) -> None:
        self._task = task
        self._module = module
        self._ruled = frozenset(rules_of(task, module))
        self._steps = 0
        self._joined_at: int | None = None
        self._changed: list[str] = []  # found late, and not told yet
        there = digests_of(module)
        self._before = {name: value for name, value in there.items() if name not in self._ruled}
        self.constants = constants_of(module, there)

    def on_work(self, version: int) -> None:
        """Work came, on parameters of ``version`` region steps; the first says when it joined."""
        if self._joined_at is None:
            self._joined_at = version

    def after_step(self) -> None:
        """A step was computed.

        Raises:
            TaskStateError: it is one of the first of a run; naming what has changed.
        """
        self._steps += 1
        is_first = self._steps <= WATCHED_STEPS
        if is_first and (self._joined_at or 0) <= WATCHED_STEPS:
            self._refuse(self._found())
        elif is_first or self._steps & (self._steps - 1) == 0:
            self.look()

    def look(self) -> None:
        """Compare all that must stay as it is with what it was; see `take_changed`."""
        changed = self._found()
        self._changed += changed
        self._ruled |= frozenset(changed)  # told once
        self._before = {k: v for k, v in self._before.items() if k not in self._ruled}

    def _found(self) -> list[str]:
        now = digests_of(self._module, but=self._ruled)
        return sorted(
            name for name in self._before.keys() | now.keys()
            if self._before.get(name) != now.get(name) and not is_scratch(self._task, name)
        )  # fmt: skip

    def _refuse(self, changed: list[str]) -> None:
        if not changed:
            return
        name = type(self._task).__name__
        raise TaskStateError(
            f"{name}: a training step changes {_listed(changed)}, which is "
            "neither trained nor carried: it would be in no exchange and in no checkpoint",
            fix=f'Declare it in the task, for example carry = {{"{changed[0]}": "mean"}}; '
            "docs/tasks.md has the rules.",
        )

    def take_changed(self) -> str | None:
        """What was found late since this was asked last, in words; None: nothing."""
        changed, self._changed = self._changed, []
        return _listed(sorted(changed)) if changed else None


def digests_of(module: nn.Module, but: Collection[str] = ()) -> dict[str, str]:
    """Digests of all buffers and frozen parameters, but for some."""
    return {name: _digest(t) for name, t in state_of(module).items() if name not in but}


def constants_of(module: nn.Module, digests: Mapping[str, str] | None = None) -> dict[str, str]:
    """Digests of frozen parameters and saved buffers, which all processes must begin with.

    Buffers that are in no state dictionary are left out: each process computes those by itself.

    Args:
        module: as it was made.
        digests: of `digests_of`, if they are known.
    """
    saved = module.state_dict().keys()
    found = digests_of(module, state_of(module).keys() - saved) if digests is None else digests
    return {name: value for name, value in found.items() if name in saved}


def check_same_size(here: int, wanted: int, who: str) -> None:
    """Refuse to train another model than the rest of the run does.

    Args:
        here: parameters of this process's model.
        wanted: of that of the process that started the run.
        who: this process, in words.

    Raises:
        TaskStateError: they differ.
    """
    if here != wanted:
        raise TaskStateError(
            f"the task's model(seed) gives {who} {here} parameters, and gave {wanted} where the "
            "run was started",
            fix="Have the same release of the task on all machines, and start them again.",
        )


def check_constants(here: Mapping[str, str], wanted: Mapping[str, str], who: str) -> None:
    """Refuse to train with other frozen values than the rest of the run.

    Args:
        here: of this process.
        wanted: of the process that started the run.
        who: this process, in words.

    Raises:
        TaskStateError: naming what differs.
    """
    differing = sorted(n for n in wanted.keys() | here.keys() if wanted.get(n) != here.get(n))
    if differing:
        raise TaskStateError(
            f"the task's model(seed) gives {who} other values of {_listed(differing)} than it gave "
            "where the run was started",
            fix="Let it read the same files everywhere, and draw random numbers from the seed.",
        )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}:".encode(), digest_size=16)
    found.update(flat.numpy().data)
    return found.hexdigest()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(repr(name) for name in names[:_MOST_NAMED]) + more
