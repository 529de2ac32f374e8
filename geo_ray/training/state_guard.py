"""Detects undeclared changes of a model's values, and differences between processes.

Values that are neither trained nor declared model buffers must not change: they are in no exchange
and no checkpoint. Their digests are compared between processes at the start, and checked after a
worker's first steps, after steps whose number is a power of two, and before every evaluation. A
change in the first steps ends the run, before it has cost anything. A change that begins later (an
average from step 100 on, a queue that fills at an epoch's end), or is found by a worker that joined
late, is reported once, and the run continues. A check reads all of that state once; a run of N
steps makes log2(N) checks and one per evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from geo_ray.base.errors import TaskStateError
from geo_ray.data.tasks.model_buffers import is_scratch, rules_of, state_of

WATCHED_STEPS: Final = 3
"""First steps of a run, and of a worker, in which a change of its model's values is an error."""

_MOST_NAMED: Final = 6

ChangeKind: TypeAlias = Literal["changed", "unfrozen", "frozen"]
"""Values changed; ``requires_grad`` of an untrained parameter came on, or of a trained one off."""

CHANGE_KINDS: Final[tuple[ChangeKind, ...]] = get_args(ChangeKind)

_MEANING: Final[Mapping[ChangeKind, str]] = {
    "changed": "changes {names}, which is neither trained nor a declared model buffer: it would be "
    "in no exchange and in no checkpoint",
    "unfrozen": "needs gradients of {names}, which is not trained: it was frozen or absent "
    "when the run started",
    "frozen": "switches requires_grad of {names} off, which was on when the run started: weight "
    "decay and momentum would still change it",
}
_FIX: Final[Mapping[ChangeKind, str]] = {
    "changed": 'Declare it in the task, for example model_buffers = {{"{first}": "mean"}}; '
    "docs/guides/tasks.md has the rules.",
    "unfrozen": "Leave requires_grad on in model(seed), and detach its output in the loss for as "
    "long as it must not train; docs/guides/tasks.md has an example of gradual unfreezing.",
    "frozen": "Switch it off in model(seed); or leave it on, and detach its output in the loss "
    "once it must not train; docs/guides/tasks.md has an example.",
}


@dataclass(frozen=True, slots=True)
class StateChange:
    """Undeclared change of a model's parameters or buffers.

    Attributes:
        how: kind of change.
        names: affected parameters or buffers.
    """

    how: ChangeKind
    names: str


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
        self._trained = _trained_names(module)
        self._changed: dict[str, ChangeKind] = {}  # found late, not reported yet
        there = digests_of(module)
        self._before = {name: value for name, value in there.items() if name not in self._ruled}
        self.constants = constants_of(module, there)

    def on_work(self, version: int) -> None:
        """Record work on parameters of ``version`` region steps."""
        if self._joined_at is None:
            self._joined_at = version

    def after_step(self) -> None:
        """Record a completed step, and check if due.

        Raises:
            TaskStateError: a change in the first steps of a run; names the values.
        """
        self._steps += 1
        is_first = self._steps <= WATCHED_STEPS
        if is_first and (self._joined_at or 0) <= WATCHED_STEPS:
            self._refuse(self._found())
        elif is_first or self._steps & (self._steps - 1) == 0:
            self.look()

    def look(self) -> None:
        """Compare all constant values with their first digests; see `take_changed`."""
        changed = self._found()
        self._changed |= changed
        self._ruled |= changed.keys()  # reported once
        self._trained |= {name for name, how in changed.items() if how == "unfrozen"}
        self._before = {k: v for k, v in self._before.items() if k not in self._ruled}

    def _found(self) -> dict[str, ChangeKind]:
        now, trained = digests_of(self._module, but=self._ruled), _trained_names(self._module)
        found: dict[str, ChangeKind] = dict.fromkeys(
            (name for name in self._before.keys() | now.keys()
             if self._before.get(name) != now.get(name)), "changed",
        )  # fmt: skip
        found |= dict.fromkeys(self._trained & now.keys(), "frozen")
        found |= dict.fromkeys(trained - self._trained, "unfrozen")
        return {name: found[name] for name in sorted(found) if not is_scratch(self._task, name)}

    def _refuse(self, changed: Mapping[str, ChangeKind]) -> None:
        for how, names in _by_kind(changed):
            raise TaskStateError(
                f"{type(self._task).__name__}: a training step "
                + _MEANING[how].format(names=_listed(names)),
                fix=_FIX[how].format(first=names[0]),
            )

    def take_changed(self) -> list[StateChange]:
        """Return the changes found late since the last call."""
        changed, self._changed = self._changed, {}
        return [StateChange(how, _listed(names)) for how, names in _by_kind(changed)]


def _trained_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad)


def _by_kind(changed: Mapping[str, ChangeKind]) -> list[tuple[ChangeKind, list[str]]]:
    """Return the changes with the names of each, most surprising kind first."""
    kinds = [
        (how, [n for n, kind in changed.items() if kind == how]) for how in reversed(CHANGE_KINDS)
    ]
    return [(how, names) for how, names in kinds if names]


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
    """Refuse to train another model than the rest of the run.

    Args:
        here: parameters of this process's model.
        wanted: parameters of the model of the process that started the run.
        who: this process, for the error.

    Raises:
        TaskStateError: the sizes differ.
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
        here: digests of this process.
        wanted: digests of the process that started the run.
        who: this process, for the error.

    Raises:
        TaskStateError: names the differing values.
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
