"""What every task promises, beside its form: that its model is carried and trained as it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from geo_ray.base.random_state import generators_restored
from geo_ray.base.types import Span
from geo_ray.data.tasks.base import Columns, SelfContained, Task, num_rows
from geo_ray.data.tasks.checked_calls import checked_loss, checked_model
from geo_ray.data.tasks.groups import group_runs
from geo_ray.data.tasks.load import parse_column_type
from geo_ray.testing.checks import expect
from geo_ray.training.parameters import CarryLayout, read_parameters
from geo_ray.training.state_guard import WATCHED_STEPS
from geo_ray.training.worker import Worker

_ROWS: Final = 8
_SEED: Final = 3
_RATE: Final = 0.01


def _rows(task: Task) -> Columns:
    """A few rows: the task's own, or random ones of its columns."""
    if isinstance(task, SelfContained):
        return {name: column[:_ROWS] for name, column in task.dataset(_SEED).train.items()}
    chance = np.random.default_rng(_SEED)
    found = {}
    for name, text in task.columns.items():
        kind = parse_column_type(text)
        shape = (_ROWS,) if kind.length is None else (_ROWS, kind.length)
        whole = chance.integers(0, 2, shape)
        found[name] = (chance.normal(size=shape) if kind.dtype.kind == "f" else whole).astype(
            kind.dtype
        )
    return found


def _worker(task: Task) -> Worker:
    module = checked_model(task, _SEED)
    carried_B = CarryLayout.of(task, module).read(module)
    buffer = torch.cat([carried_B.view(torch.float32), read_parameters(module)])
    return Worker(task, buffer, torch.zeros_like(buffer), region="here", seed=_SEED)


def _same_model(task: Task) -> None:
    one, again = (checked_model(task, _SEED).state_dict() for _ in range(2))
    differing = [name for name in one if not torch.equal(one[name], again[name])]
    expect(not differing, f"two models of one seed differ in {', '.join(differing)}")


def _steps(task: Task) -> None:
    worker, rows = _worker(task), _rows(task)
    for i in range(WATCHED_STEPS):
        worker.step(rows, Span(i * _ROWS, num_rows(rows)))
        worker.carried_B.copy_(worker.left_B)
        # As training does: what follows the parameters stands still while they do.
        worker.params_P.sub_(worker.grad_P, alpha=_RATE)


def _again(task: Task) -> None:
    worker, rows = _worker(task), _rows(task)
    span = Span(0, num_rows(rows))
    found = []
    for _ in range(2):
        worker.step(rows, span)
        found.append((worker.grad_P.clone(), worker.left_B.clone()))
    (grad_P, left_B), (other_P, other_B) = found
    expect(
        torch.equal(grad_P, other_P),
        "a step from the same values gives another gradient: something that changes is not a "
        "buffer or parameter of the model, or has the rule scratch although it is used again",
    )
    expect(torch.equal(left_B, other_B), "a step from the same values leaves other carried values")


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
        "PyTorch: loss or evaluate depends on what was computed before",
    )


def _carry(task: Task) -> None:
    module = checked_model(task, _SEED)
    layout = CarryLayout.of(task, module)
    vector_B = layout.read(module)
    layout.write(vector_B, checked_model(task, _SEED + 1))
    expect(
        layout == CarryLayout.of(task, checked_model(task, _SEED + 1)),
        "what is carried depends on the seed",
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
            f"evaluate: {name!r} of two halves does not add up to that of the whole",
        )


CHECKS: Final[Mapping[str, Callable[[Task], None]]] = {
    "a seed gives one model": _same_model,
    "what it carries can be carried": _carry,
    "what a step changes is trained or carried": _steps,
    "a step that is done again gives the same bits": _again,
    "a step gives the gradient that PyTorch gives": _gradient,
    "its groups are of its parameters": _groups,
    "evaluations add up": _sums,
}
