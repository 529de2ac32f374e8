"""A worker's push under gradient coding: one combination of the gradients of several workers' rows.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from geo_ray.tasks.base import Columns
from geo_ray.training.compute.local_steps import LocalSteps
from geo_ray.training.compute.worker import StepResult, Worker
from geo_ray.types import CodedShare, Span


def coded_step(
    worker: Worker | LocalSteps,
    parts: Sequence[CodedShare],
    own: Span,
    read: Callable[[Span], Columns],
) -> StepResult:
    """Leave the weighted sum of the parts' mean gradients in the worker's gradient buffer.

    Args:
        worker: computes.
        parts: rows and weights; one that cannot be used spoils all.
        own: the rows whose loss is reported.
        read: gives the rows of a span.
    """
    total_P = torch.zeros_like(worker.grad_P)
    told = StepResult(None)
    for part in parts:
        result = worker.step(read(part.span), part.span)
        if result.loss is None:
            return result
        total_P.add_(worker.grad_P, alpha=part.weight)
        told = replace(result, grad_sq=None) if part.span == own or told.loss is None else told
    worker.grad_P.copy_(total_P)
    return told
