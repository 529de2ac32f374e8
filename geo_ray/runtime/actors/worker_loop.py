"""A worker over sockets: pulls parameters and rows, pushes gradients, until it is sent home.

On one host all buffers are shared memory: the model's parameters and gradients *are* the buffer, a
push or pull only signals. Across hosts the same requests carry the bytes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from geo_ray.data.reader import RegionReader
from geo_ray.errors import GeoRayError, TaskOutputError
from geo_ray.job.candidates import Note
from geo_ray.runtime.actors.deadlines import answer_s
from geo_ray.runtime.actors.layout import shared_bytes, shared_gradient, shared_parameters
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    as_tensor,
    read_answer,
    report_meta,
    stats_message,
)
from geo_ray.tasks.base import Columns
from geo_ray.training.compute.coded_step import coded_step
from geo_ray.training.compute.flat import split_sizes
from geo_ray.training.compute.local_steps import LocalSteps
from geo_ray.training.compute.worker import StepResult, Worker
from geo_ray.training.server.effects import Assignment
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.types import Span, StepReport


class ShardLink:
    """One worker's connection to one shard, with its slices of the buffers.

    Args:
        client: the connection.
        params_S: the worker's parameters of this slice, fp32 (S,).
        grad_S: the worker's gradient of this slice, fp32 (S,).
        timeout_s: longest wait for others; the shard gives up earlier, see `deadlines`.
    """

    def __init__(
        self, client: LanClient, params_S: Tensor, grad_S: Tensor, timeout_s: float
    ) -> None:
        self.client = client
        self._params_S = params_S
        self._grad_S = grad_S
        self._timeout_s = answer_s(timeout_s)
        shared = client.shared
        count = params_S.numel()
        self._shared_grad_S = None if shared is None else shared_gradient(shared, count)
        self._shared_params_S = None if shared is None else shared_parameters(shared, count)

    def exchange(self, meta: Meta, *, push: bool) -> Meta:
        """One request that may push the gradient, and always brings the parameters."""
        answer, payload = self._request(meta, push=push)
        self._take(payload)
        return answer

    def put(self) -> None:
        """Push the gradient slice and wait for the receipt only."""
        self._request({"op": "put"}, push=True)

    def pull(self, what: str = "pull") -> None:
        """Fetch the parameter slice: the live one, or what is ``eval_params``."""
        _, payload = self._request({"op": what}, push=False)
        self._take(payload)

    def _request(self, meta: Meta, *, push: bool) -> tuple[Meta, memoryview | None]:
        outgoing = None
        if push and self._shared_grad_S is not None:
            if self._shared_grad_S.data_ptr() != self._grad_S.data_ptr():
                self._shared_grad_S.copy_(self._grad_S)
        elif push:
            outgoing = as_bytes(self._grad_S)
        into = as_bytes(self._params_S) if self._shared_params_S is None else None
        return self.client.request(meta, outgoing, into=into, timeout_s=self._timeout_s)

    def _take(self, payload: memoryview | None) -> None:
        if self._shared_params_S is None:  # received in place
            as_tensor(payload, self._params_S.numel())
        elif self._shared_params_S.data_ptr() != self._params_S.data_ptr():
            self._params_S.copy_(self._shared_params_S)


def dial_shards(
    addresses: Sequence[Address],
    key: bytes,
    hello: Meta,
    num_params: int,
    *,
    shared: bool = True,
    config: LanConfig | None = None,
) -> list[LanClient]:
    """Connect one worker to all shards, primary first; ``shared`` offers memory of both ends."""
    pieces = split_sizes(num_params, len(addresses))
    sizes = [shared_bytes(stop - start) if shared else 0 for start, stop in pieces]
    return [
        LanClient(address, key, hello, shared_bytes=size, config=config)
        for address, size in zip(addresses, sizes, strict=True)
    ]


def links_over(
    clients: Sequence[LanClient], num_params: int, timeout_s: float
) -> tuple[Tensor, Tensor, list[ShardLink]]:
    """One worker's parameters and gradient, fp32 (P,) each, and its links to all shards.

    The vectors are the shared memory itself if there is one shard.
    """
    shared = clients[0].shared if len(clients) == 1 else None
    if shared is None:
        params_P, grad_P = torch.zeros(num_params), torch.zeros(num_params)
    else:
        params_P = shared_parameters(shared, num_params)
        grad_P = shared_gradient(shared, num_params)
    pieces = split_sizes(num_params, len(clients))
    links = [
        ShardLink(client, params_P[start:stop], grad_P[start:stop], timeout_s)
        for client, (start, stop) in zip(clients, pieces, strict=True)
    ]
    return params_P, grad_P, links


class WorkerLoop:
    """See the module's docstring.

    Args:
        worker: computes.
        links: to the shards, primary first.
        train: the region's training stream.
        heldout: its held-out rows.
        rank: this worker's rank.
        eval_rows: rows per evaluation batch.
        step_s: how long the step over some rows is padded to; None for no padding.
        note: takes evaluated parameters; None if nobody wants them.
    """

    def __init__(
        self,
        worker: Worker | LocalSteps,
        links: Sequence[ShardLink],
        train: RegionReader,
        heldout: RegionReader,
        *,
        rank: int,
        eval_rows: int,
        step_s: Callable[[Span], float] | None,
        note: Note | None = None,
    ) -> None:
        self._worker = worker
        self._primary, *self._others = links
        self._train = train
        self._heldout = heldout
        self._rank = rank
        self._eval_rows = eval_rows
        self._step_s = step_s
        self._note = note

    def run(self) -> int:
        """Work until sent home.

        Returns:
            The number of steps computed.

        Raises:
            TaskOutputError, DataError, TransportError: whatever stops this worker.
        """
        steps = 0
        answer = self._ask({"op": "join"}, push=False)
        while True:
            began_s = time.monotonic()
            if answer.evaluate:
                self._evaluate(answer)
            if answer.span is None:
                return steps
            result = self._step(answer, answer.span)
            if self._step_s is not None:
                least_s = self._step_s(answer.span) * max(1, len(answer.parts))
                time.sleep(max(0.0, began_s + least_s - time.monotonic()))
            elapsed_s = time.monotonic() - began_s
            found = (result.refused, result.grad_sq)
            report = StepReport(answer.span, result.loss, elapsed_s, *found)
            steps += 1
            answer = self._ask(report_meta(report), push=True)

    def _step(self, answer: Assignment, span: Span) -> StepResult:
        if not answer.parts:
            columns = self._read(span)
            with _blamed_on_task():
                return self._worker.step(columns, span)
        with _blamed_on_task():
            return coded_step(self._worker, answer.parts, span, self._read)

    def _read(self, span: Span) -> Columns:
        return self._train.read(span.start, span.count)

    def _ask(self, meta: Meta, *, push: bool) -> Assignment:
        if push:  # the primary shard may apply it at once: it is the last to get its part
            for other in self._others:
                other.put()
        answer = read_answer(self._rank, self._primary.exchange(meta, push=push))
        for other in self._others:
            other.pull()
        return answer

    def _evaluate(self, answer: Assignment) -> None:
        if answer.eval_params:
            self._pull("judged")
        with _blamed_on_task():
            stats, rows = self._worker.evaluate_all(self._heldout.scan(self._eval_rows))
        model = None
        if self._note is not None:
            model = self._note(answer.version, self._worker.params_P, answer.done)
        if answer.eval_params:
            self._pull("pull")
        meta, payload = stats_message(answer.version, stats, rows, final=answer.done, model=model)
        self._primary.client.request(meta, payload, timeout_s=60.0)

    def _pull(self, what: str) -> None:
        for link in (self._primary, *self._others):
            link.pull(what)


@contextmanager
def _blamed_on_task() -> Iterator[None]:
    """Whatever is not of geo_ray's tree comes from the user's code, or from torch on its behalf."""
    try:
        yield
    except GeoRayError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskOutputError(
            f"the task raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
            fix="Mend the named line, or what the task gives to it.",
        ) from error
