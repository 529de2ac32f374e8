"""The contract suite behind `geo-ray check`: finds a strategy, codec or task and checks it.

Strategies and codecs are also checked in another process, a new interpreter with another hash
seed: results must not depend on this process's memory or hashes. ``python -m
geo_ray.testing.run`` is that process; it reads a request as JSON and answers in JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from geo_ray.base.errors import ConfigError, GeoRayError
from geo_ray.base.load import load_text
from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import generators_restored
from geo_ray.base.types import Span
from geo_ray.base.user_code import UserClass, find_class, or_meant
from geo_ray.base.user_section import context
from geo_ray.codecs.base import Codec, Coded
from geo_ray.codecs.registry import CODECS
from geo_ray.data.columns import Column, ColumnType, Ragged
from geo_ray.data.tasks.base import Columns, SelfContained, Task, num_rows
from geo_ray.data.tasks.checked_calls import checked_dataset, checked_loss, checked_model
from geo_ray.data.tasks.groups import group_runs
from geo_ray.data.tasks.load import (
    BUILT_IN,
    METHODS,
    TaskConfig,
    load_task,
)
from geo_ray.runs.build import placed
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import AnyCodec, AnyStrategy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.testing import codecs, strategies
from geo_ray.testing.checks import BrokenPromiseError, Checks, Finding, expect, run_checks
from geo_ray.testing.codecs import gauss, heavy
from geo_ray.testing.strategies import whole_run
from geo_ray.training.optimizers import TaskSteps
from geo_ray.training.parameters import BufferLayout, digest, read_parameters
from geo_ray.training.state_guard import WATCHED_STEPS
from geo_ray.training.worker import OwnSteps, Worker

_ANY = UserClass("strategy, codec or task", ConfigError, "examples/own_strategy.py")
T = TypeVar("T")
What: TypeAlias = Literal["strategy", "codec", "task"]


def _methods_of(protocol: type) -> tuple[str, ...]:
    return tuple(k for k, v in vars(protocol).items() if inspect.isfunction(v) and k[0] != "_")


_METHODS: Final[Mapping[What, tuple[str, ...]]] = {
    "strategy": _methods_of(Strategy),
    "codec": _methods_of(Codec),
    "task": tuple(METHODS),
}


class StrategySection(StrictModel):
    """A configuration with only a strategy."""

    option: AnyStrategy


class CodecSection(StrictModel):
    """A configuration with only a codec."""

    option: AnyCodec


class TaskSection(StrictModel):
    """A configuration with only a task."""

    option: TaskConfig


@dataclass(frozen=True, slots=True)
class Subject:
    """The object to check: a strategy, a codec or a task.

    Attributes:
        strategy: the strategy, or None.
        codec: the codec, or None.
        task: the task, or None.
        base_dir: base of a relative path to its file.
    """

    strategy: Strategy | None = None
    codec: Codec | None = None
    task: Task | None = None
    base_dir: Path = Path()


def load(name: str, options: Sequence[str], base_dir: Path) -> Subject:
    """Find the class and build an object of it.

    Args:
        name: `path/to/file.py:Class`, `package.module:Class`, or the name of a built-in class.
        options: entries ``key=value``.
        base_dir: base of a relative path.

    Raises:
        ConfigError: the class does not exist, or it cannot be used.
    """
    overrides = [f"option.{option}" for option in options]
    if name in BUILT_IN:
        return _task(name, options, base_dir)
    if name in STRATEGIES or name in CODECS:
        built_in: What = "codec" if name in CODECS else "strategy"
        return _built(built_in, {"kind": name}, overrides, name, base_dir, "Correct --option.")
    if ":" not in name:
        meant = or_meant(name, {*BUILT_IN, *STRATEGIES, *CODECS})
        raise ConfigError(
            f"no strategy, codec or task {name!r}{meant}",
            fix="Write FILE.py:CLASS for a custom class. `geo-ray train CONFIG --dry-run` checks a "
            "configuration.",
        )
    kind = find_class(name, base_dir, _ANY)
    what = _what_is(name, kind)
    if what == "task":
        return _task(name, options, base_dir)
    if issubclass(kind, StrictModel):
        _check_names(name, kind, options)
    return _built(what, {"use": name}, overrides, name, base_dir)


def _check_names(name: str, kind: type[StrictModel], options: Sequence[str]) -> None:
    """Reject unknown options by name."""
    for option in options:
        key = option.partition("=")[0].partition(".")[0].strip()
        if key not in kind.model_fields:
            hint = or_meant(key, set(kind.model_fields) - {"kind"}) or "; it takes no options"
            raise ConfigError(f"{name} has no option {key!r}{hint}", fix=_about_options(kind))


def _about_options(kind: type[StrictModel]) -> str:
    fields = {name: info for name, info in kind.model_fields.items() if name != "kind"}
    if not fields:
        return "Omit --option: the class has no options."
    shown = [
        f"{name} ({'required' if info.is_required() else f'default {info.default!r}'}"
        + (f": {info.description})" if info.description else ")")
        for name, info in fields.items()
    ]
    return f"Its options are {'; '.join(shown)}."


def object_of(what: What, section: Mapping[str, object], base_dir: Path) -> Subject:
    """Rebuild a strategy or codec from its section, a result of `model_dump`.

    Args:
        what: strategy or codec.
        section: section with ``kind`` or ``use``, and its options.
        base_dir: base of a relative path.

    Raises:
        ConfigError: as for `load`.
    """
    return _built(what, section, [], what, base_dir)


def _task(name: str, options: Sequence[str], base_dir: Path) -> Subject:
    text = json.dumps({"option": {"use": name}})
    overrides = [f"option.options.{option}" for option in options]
    section = load_text(text, overrides, TaskSection, name).option
    return Subject(task=load_task(section, base_dir), base_dir=base_dir)


def _built(
    what: What,
    section: Mapping[str, object],
    overrides: list[str],
    name: str,
    base_dir: Path,
    fix: str = (
        "Correct the class, or the value of --option; "
        "docs/guides/custom-strategies.md lists what a class needs."
    ),
) -> Subject:
    text, where = json.dumps({"option": section}), context(base_dir)
    if what == "codec":
        codec = load_text(text, overrides, CodecSection, name, fix, where).option
        return Subject(codec=codec, base_dir=base_dir)
    strategy = load_text(text, overrides, StrategySection, name, fix, where).option
    return Subject(strategy=strategy, base_dir=base_dir)


def _what_is(name: str, kind: type) -> What:
    """Return which kind a custom class is, from its methods.

    Raises:
        ConfigError: it has the methods of none, or of several kinds.
    """
    members = dict(inspect.getmembers_static(kind))
    lacks = {
        what: [key for key in wanted if key not in members] for what, wanted in _METHODS.items()
    }
    begun = [what for what, wanted in _METHODS.items() if len(lacks[what]) < len(wanted)]
    if len(begun) == 1:
        return begun[0]
    if not begun:
        wants = "; ".join(f"a {what} has {', '.join(keys)}" for what, keys in lacks.items())
        raise ConfigError(
            f"{name} is not a strategy, codec or task: {wants}",
            fix=(
                "See docs/guides/custom-strategies.md and docs/guides/tasks.md, which "
                "have a complete example of each."
            ),
        )
    whole = [what for what in begun if not lacks[what]]
    if len(whole) == 1:
        return whole[0]
    raise ConfigError(
        f"{name} has methods of {' and of '.join(f'a {what}' for what in begun)}",
        fix="Write a separate class for each.",
    )


def checked(subject: Subject, promises: Collection[str] | None = None) -> list[Finding]:
    """Run the checks of its kind.

    Args:
        subject: the object to check.
        promises: names of the checks to run; None for all.
    """
    found: list[Finding] = []
    if subject.strategy is not None:
        elsewhere = partial(check_strategy, base_dir=subject.base_dir)
        checks: Checks[Strategy] = {
            **strategies.CHECKS,
            "another process ends with the same bits": elsewhere,
        }
        found += run_checks(_chosen(checks, promises), subject.strategy)
    if subject.codec is not None:
        decoding = partial(check_codec, base_dir=subject.base_dir)
        coding: Checks[Codec] = {**codecs.CHECKS, "another process decodes the same": decoding}
        found += run_checks(_chosen(coding, promises), subject.codec)
    if subject.task is not None:
        found += run_checks(_chosen(task_checks(subject.task), promises), subject.task)
    return found


def _chosen(checks: Checks[T], promises: Collection[str] | None) -> Checks[T]:
    return {name: check for name, check in checks.items() if promises is None or name in promises}


# ------------------------------------------------------------------ tasks


_ROWS: Final = 8
_SEED: Final = 3
_RATE: Final = 0.01
_RAGGED_ROWS: Final = {"string": "abcdefgh", "bytes": b"abcdefgh", "list": [1, 0] * 4}


def _rows(task: Task) -> Columns:
    """Return a few rows: the task's own, or random ones of its columns."""
    if isinstance(task, SelfContained):
        train = checked_dataset(task, _SEED).train
        return {name: column[:_ROWS] for name, column in train.items()}
    chance = np.random.default_rng(_SEED)
    found: dict[str, Column] = {}
    for name, text in task.columns.items():
        kind = ColumnType.parse(text, name)
        if kind.ragged is not None:
            found[name] = Ragged.of(
                text, [_RAGGED_ROWS[kind.ragged][: n + 1] for n in range(_ROWS)]
            )
            continue
        shape = (_ROWS,) if kind.length is None else (_ROWS, kind.length)
        whole = chance.integers(0, 2, shape)
        found[name] = (chance.normal(size=shape) if kind.dtype.kind == "f" else whole).astype(
            kind.dtype
        )
    return found


def _makes_steps(task: Task) -> bool:
    """Tell whether the task has optimizers of its own."""
    return hasattr(task, "optimizer") or hasattr(task, "train_step")


def _worker(task: Task, *, own: bool = False) -> Worker:
    """Return a worker; ``own``: the task makes its steps."""
    task = placed(task, "here", 0)
    module = checked_model(task, _SEED)
    buffers_B = BufferLayout.of(task, module).read(module)
    buffer = torch.cat([buffers_B.view(torch.float32), read_parameters(module)])
    steps = OwnSteps(TaskSteps()) if own else None
    grads = torch.zeros_like(buffer)
    return Worker(task, buffer, grads, region="here", seed=_SEED, module=module, own=steps)


def _same_model(task: Task) -> None:
    one, again = (checked_model(task, _SEED).state_dict() for _ in range(2))
    differing = [name for name in one if not torch.equal(one[name], again[name])]
    expect(not differing, f"two models of one seed differ in {', '.join(differing)}")


def _steps(task: Task) -> None:
    worker, rows = _worker(task, own=_makes_steps(task)), _rows(task)
    for i in range(WATCHED_STEPS):
        worker.step(rows, Span(i * _ROWS, num_rows(rows)))
        worker.buffers_B.copy_(worker.left_B)
        if worker.optimizer is None:
            # As in training: buffers that depend on the parameters are constant while those are.
            worker.params_P.sub_(worker.grad_P, alpha=_RATE)


def _own_steps(task: Task) -> None:
    """Make steps as a run does, and continue from their state in another worker."""
    rows = _rows(task)
    spans = [Span(i * _ROWS, num_rows(rows)) for i in range(WATCHED_STEPS)]
    before, after = spans[:-1], spans[-1]
    whole = _worker(task, own=True)
    for span in before:
        whole.step(rows, span)
    resumed = _worker(task, own=True)
    resumed.params_P.copy_(whole.kept())
    resumed.buffers_B.copy_(whole.buffers_B)
    resumed.load()
    if whole.optimizer is not None and resumed.optimizer is not None:
        resumed.optimizer.restore(whole.optimizer.export())
    found = []
    for worker in (whole, resumed):
        worker.step(rows, after)
        found.append((worker.kept(), worker.buffers_B.clone()))
    (params_P, buffers_B), (other_P, other_B) = found
    expect(
        torch.equal(params_P, other_P) and torch.equal(buffers_B, other_B),
        "a step after a resume gives other parameters: something that it uses is not in the state "
        "of the optimizers, or they were made for another model",
    )


def _again(task: Task) -> None:
    makes_all = hasattr(task, "train_step")
    worker, rows = _worker(task, own=makes_all), _rows(task)
    span, params_P, buffers_B = Span(0, num_rows(rows)), worker.kept(), worker.buffers_B.clone()
    state = {} if worker.optimizer is None else worker.optimizer.export()
    found = []
    for _ in range(2):
        worker.keep(params_P)
        worker.buffers_B.copy_(buffers_B)
        if worker.optimizer is not None:
            worker.optimizer.restore(state)
        worker.step(rows, span)
        found.append((worker.kept() if makes_all else worker.grad_P.clone(), worker.left_B.clone()))
    (result_P, left_B), (other_P, other_B) = found
    what = "other parameters" if makes_all else "another gradient"
    expect(
        torch.equal(result_P, other_P),
        f"a step from the same values gives {what}: state that changes is not a buffer or "
        "parameter of the model, or has the rule scratch but is used again",
    )
    expect(torch.equal(left_B, other_B), "a step from the same values gives other model buffers")


def _gradient(task: Task) -> None:
    worker, rows = _worker(task), _rows(task)
    span = Span(0, num_rows(rows))
    alone = checked_model(task, _SEED).train()
    with generators_restored(worker.rng_devices()):
        batch = worker.collate(rows, span)
        checked_loss(task, alone, batch).backward()  # type: ignore[no-untyped-call]
    worker.evaluate(rows)
    worker.step(rows, span)
    trained = [(name, p) for name, p in alone.named_parameters() if p.requires_grad]
    parts = torch.split(worker.grad_P, [p.numel() for _, p in trained])
    differing = []
    for (name, p), part in zip(trained, parts, strict=True):
        wanted = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        if not torch.allclose(part.view(p.shape), wanted, rtol=1e-4, atol=1e-6):
            differing.append(name)
    expect(
        not differing,
        f"a step gives another gradient of {', '.join(differing)} than backward gives in a loop of "
        "PyTorch: loss or evaluate depends on earlier computations",
    )


def _model_buffers(task: Task) -> None:
    module = checked_model(task, _SEED)
    layout = BufferLayout.of(task, module)
    vector_B = layout.read(module)
    layout.write(vector_B, checked_model(task, _SEED + 1))
    expect(
        layout == BufferLayout.of(task, checked_model(task, _SEED + 1)),
        "the model buffers depend on the seed",
    )


def _groups(task: Task) -> None:
    first, other = (group_runs(task, checked_model(task, seed)) for seed in (_SEED, _SEED + 1))
    expect(first == other, "its groups depend on the seed")


def _sums(task: Task) -> None:
    worker, rows = _worker(task), _rows(task)
    half = num_rows(rows) // 2
    parts = [{k: v[:half] for k, v in rows.items()}, {k: v[half:] for k, v in rows.items()}]
    whole, summed = worker.evaluate(rows), worker.evaluate_all(parts)[0]
    for name, value in whole.items():
        expect(
            bool(np.allclose(value, summed[name], rtol=1e-4, atol=1e-6)),
            f"evaluate: {name!r} of two halves does not add up to the total",
        )


_GRADIENT: Final = "a step gives the gradient that PyTorch gives"
TASK_CHECKS: Final[Checks[Task]] = {
    "a seed determines the model": _same_model,
    "its model buffers can be exchanged": _model_buffers,
    "a step changes only parameters and declared model buffers": _steps,
    "a repeated step gives the same bits": _again,
    _GRADIENT: _gradient,
    "its groups cover its parameters": _groups,
    "evaluations add up": _sums,
}


def task_checks(task: Task) -> Checks[Task]:
    """Return the checks of a task; those of its steps execute what a run executes."""
    checks = dict(TASK_CHECKS)
    if hasattr(task, "train_step"):  # which need not use the gradients of `loss`
        del checks[_GRADIENT]
    if _makes_steps(task):
        checks["its steps continue from a checkpoint"] = _own_steps
    return checks


# ------------------------------------------------------------------ another process


_NUM: Final = 1003
_STEPS: Final = 3
_TIMEOUT_S: Final = 300.0
_WRAPPER: Final = "geo_ray.testing.run"


def check_codec(codec: Codec, base_dir: Path) -> None:
    """Check that another process decodes the same values and encodes the same bytes.

    Raises:
        BrokenPromiseError: the results differ.
    """
    coded = encoded(codec)
    coded_rows = [{"num": c.num, "data": bytes(c.data_B.tolist()).hex()} for c in coded]
    found = _asked({"codec": _section(codec), "base_dir": str(base_dir), "coded": coded_rows})
    expect(
        found["decoded"] == decoded(codec, coded),
        "another process decodes other values: the bytes must contain all inputs of decode",
    )
    expect(
        found["encoded"] == [digest(each.data_B) for each in coded],
        "another process encodes the same vectors to other bytes",
    )


def check_strategy(strategy: Strategy, base_dir: Path) -> None:
    """Check that the same run ends with the same bits in another process.

    Raises:
        BrokenPromiseError: the results differ.
    """
    found = _asked({"strategy": _section(strategy), "base_dir": str(base_dir)})
    same = found["digests"] == whole_run(strategy, 1)
    expect(same, "in another process the same gradients end with different bits")


def encoded(codec: Codec) -> list[Coded]:
    """Some vectors, one stream of each kind."""
    streams = (
        [gauss(_NUM, step) for step in range(_STEPS)],
        [heavy(_NUM) * (step + 1) for step in range(_STEPS)],
    )
    found = []
    for vectors in streams:
        memory: dict[str, torch.Tensor] = {}
        found += [codec.encode(each, memory, step) for step, each in enumerate(vectors)]
    return found


def decoded(codec: Codec, coded: list[Coded]) -> list[str]:
    """Digests of the decoded vectors."""
    return [digest(codec.decode(each)) for each in coded]


def _section(subject: object) -> dict[str, Any]:
    if not isinstance(subject, StrictModel):
        raise BrokenPromiseError("it is not a StrictModel")
    return subject.model_dump(mode="json")


def _asked(what: dict[str, Any]) -> dict[str, Any]:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", _WRAPPER],
        input=json.dumps(what),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines() or [""]
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BrokenPromiseError(f"another process fails: {last}") from None
    if "error" in answer:
        raise BrokenPromiseError(f"in another process: {answer['error']}")
    return answer


def answer_to(what: dict[str, Any]) -> dict[str, Any]:
    """Repeat a check in this process."""
    base_dir = Path(what["base_dir"])
    if "strategy" in what:
        subject = object_of("strategy", what["strategy"], base_dir)
        return {"digests": whole_run(subject.strategy, 1)} if subject.strategy else {}
    codec = object_of("codec", what["codec"], base_dir).codec
    if codec is None:
        return {}
    coded = [
        Coded(
            codec.kind,
            each["num"],
            torch.tensor(list(bytes.fromhex(each["data"])), dtype=torch.uint8),
        )
        for each in what["coded"]
    ]
    # Decode first, before encode can leave state in this process.
    values = decoded(codec, coded)
    return {"decoded": values, "encoded": [digest(each.data_B) for each in encoded(codec)]}


def main() -> None:
    """Answer one request."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of the class is not the answer
        try:
            answer = answer_to(json.load(sys.stdin))
        except GeoRayError as error:
            answer = {"error": error.message}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
