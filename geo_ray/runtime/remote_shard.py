"""Shards in other processes: requests of the primary shard and of workers, and memory layout.

One table lists every operation of the primary shard on the wire, the method that executes it, and
the encoding of arguments and result. `RemoteShard` calls by it, `ShardServer` answers by it.
Workers push and pull slices through `WorkerModel` and `ShardLinks`. Shared buffers start on a cache
line, so that vectorized code gives the same bits in every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.base.errors import InvariantError, LinkDownError
from geo_ray.base.types import StepReport
from geo_ray.storage.manifest import PartInfo
from geo_ray.strategies.state import Outgoing, Wait
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.config import answer_s
from geo_ray.training.lazy_copy import StoredTensor
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.optimizers import InnerOptimizer
from geo_ray.training.parameters import split_sizes
from geo_ray.training.shard import Change, Concurrently, Contribution, Pull, Shard
from geo_ray.training.task_steps import Stored, in_memory
from geo_ray.training.wire_format import (
    as_bytes,
    as_tensor,
    contributions_meta,
    pull_meta,
    read_contributions,
    read_pull,
    read_reply,
    reply_meta,
    report_meta,
    wanted_state,
)
from geo_ray.training.worker import LocalStepsWorker, Worker
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import LanClient, LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.record import Field, Record, Rows
from geo_ray.transport.wire.sockets import Address

_LINE_BYTES = 64


def shared_bytes(count: int) -> int:
    """Return the size of the buffer for a slice of ``count`` parameters."""
    return _offset_bytes(count) + 4 * count


def shared_gradient(shared: memoryview, count: int) -> Tensor:
    """Return the worker's gradient, fp32 (count,); written by the worker, read by the shard."""
    return as_tensor(shared[: 4 * count], count)


def shared_parameters(shared: memoryview, count: int) -> Tensor:
    """Return the worker's parameters, fp32 (count,); written by the shard, read by the worker."""
    start = _offset_bytes(count)
    return as_tensor(shared[start : start + 4 * count], count)


def pushed_gradient(conn: LanConnection, payload: memoryview | None, count: int) -> Tensor:
    """Return a pushed gradient, fp32 (count,); `FrameError` if it has another size."""
    return as_tensor(payload, count) if conn.shared is None else shared_gradient(conn.shared, count)


def parameters_for(
    conn: LanConnection,
    params_S: Tensor,
    buffer: memoryview | None = None,
    buffers_B: Tensor | None = None,
) -> memoryview | None:
    """Return a copy of a slice's parameters, fp32 (S,), for the answer; None if in shared memory.

    ``buffer`` is an unused buffer of that size; None allocates one. Model buffers, uint8 (B,),
    precede the parameters.
    """
    before = 0 if buffers_B is None else buffers_B.numel() // 4
    count = before + params_S.numel()
    if conn.shared is not None:
        into, answer = shared_parameters(conn.shared, count), None
    elif buffer is None:
        into = torch.empty(count)
        answer = as_bytes(into)
    else:
        into, answer = as_tensor(buffer, count), buffer
    if buffers_B is not None:
        into[:before].view(torch.uint8).copy_(buffers_B)
    into[before:].copy_(params_S)
    return answer


def slice_for(
    conn: LanConnection, params_S: Tensor, buffers_B: Tensor | None = None
) -> memoryview | None:
    """Return the same for a worker whose gradient was applied: its buffer is reused."""
    before_bytes = 0 if buffers_B is None else buffers_B.numel()
    shared = conn.shared is not None
    buffer = None if shared else conn.buffer(before_bytes + 4 * params_S.numel())
    return parameters_for(conn, params_S, buffer, buffers_B)


def _offset_bytes(count: int) -> int:
    return -(-4 * count // _LINE_BYTES) * _LINE_BYTES


As = TypeVarTuple("As")
H = TypeVar("H")
R = TypeVar("R")
Payload: TypeAlias = memoryview | None
Packed: TypeAlias = tuple[Meta, Payload]
Request: TypeAlias = tuple[
    Callable[[str, *As], Packed],  # the operation's name and its arguments
    Callable[[Meta, Payload], tuple[*As]],
]
Result: TypeAlias = tuple[Callable[[R], Packed], Callable[[Meta, Payload], R]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table.

    Attributes:
        name: on the wire.
        run: a method of `Shard` or `HeldShard`.
        request: writes and reads the arguments.
        result: writes and reads the result.
    """

    name: str
    run: Callable[..., Any]
    request: Request[*tuple[Any, ...]]
    result: Result[Any]


def _row(
    name: str, run: Callable[[H, *As], R], request: Request[*As], result: Result[R]
) -> Operation:
    """Build a row whose method, arguments and result have matching types."""
    return Operation(name, run, request, result)


_Step = tuple[Sequence[Contribution], bool, float, float, Sequence[int], bool]


def _read_step(meta: Meta, _: Payload) -> _Step:
    measure = fields.flag(meta, "measure")
    scale, rate = (fields.number(meta, k) if k in meta else 1.0 for k in ("scale", "rate"))
    unused = fields.counts(meta, "unused") if "unused" in meta else ()
    has_state = "has_state" in meta and fields.flag(meta, "has_state")
    return read_contributions(meta), measure, scale, rate, unused, has_state


def _step(
    name: str,
    parts: Sequence[Contribution],
    measure: bool,
    scale: float = 1.0,
    rate: float = 1.0,
    unused: Sequence[int] = (),
    has_state: bool = False,
) -> Packed:
    meta = contributions_meta(parts) | {"op": name, "measure": measure}
    meta |= {"unused": list(unused)} if unused else {}
    factors = {"scale": scale, "rate": rate}
    meta |= {"has_state": True} if has_state else {}
    return meta | {key: factor for key, factor in factors.items() if factor != 1.0}, None


def _outgoing(out: Outgoing | Wait | None) -> Packed:
    if isinstance(out, Outgoing):
        meta: Meta = {"said": "outgoing", "wait": out.wait, "fragment": out.fragment}
        return meta, as_bytes(out.payload_P)
    return {"said": "wait" if isinstance(out, Wait) else "nothing"}, None


def _read_outgoing(meta: Meta, payload: Payload) -> Outgoing | Wait | None:
    what = fields.text(meta, "said")
    if what == "outgoing":
        payload_S = torch.clone(as_tensor(payload))
        return Outgoing(payload_S, fields.flag(meta, "wait"), fields.count(meta, "fragment"))
    if what not in {"wait", "nothing"}:
        raise InvariantError(f"a shard server answered {what!r}")
    return Wait() if what == "wait" else None


_NOTHING: Request[*tuple[()]] = (lambda name: ({"op": name}, None), lambda *_: ())
_STEP: Request[*_Step] = (_step, _read_step)
_MEAN: Request[Sequence[Contribution]] = (
    lambda name, parts: (contributions_meta(parts) | {"op": name}, None),
    lambda meta, _: (read_contributions(meta),),
)
_REPLY: Request[ReplyMessage] = (
    lambda name, reply: (reply_meta(reply) | {"op": name}, as_bytes(reply.payload_P)),
    lambda meta, payload: (read_reply(meta, payload),),
)
_CHECKPOINT: Request[int] = (
    lambda name, checkpoint: ({"op": name, "id": checkpoint}, None),
    lambda meta, _: (fields.count(meta, "id"),),
)
_PARTITION: Request[int] = (
    lambda name, partition: ({"op": name, "partition": partition}, None),
    lambda meta, _: (fields.count(meta, "partition"),),
)
_DONE: Result[None] = (lambda _: ({}, None), lambda *_: None)
_NORM: Result[float | None] = (
    lambda mean_sq: ({"mean_sq": mean_sq}, None),
    lambda meta, _: fields.optional_number(meta, "mean_sq"),
)
_OUTGOING: Result[Outgoing | Wait | None] = (_outgoing, _read_outgoing)
_PARAMS: Result[Tensor] = (
    lambda params_S: ({}, as_bytes(params_S.clone())),
    lambda _, payload: as_tensor(payload),
)
_PART: Result[PartInfo] = (
    lambda part: (dict(part.model_dump()), None),
    lambda meta, _: PartInfo.model_validate(meta),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A tensor of the optimizer of a worker that makes its steps.

    Attributes:
        name: its name.
        count: elements of a vector; 0 for a number.
        value: the number.
        is_whole: whether the number is an integer.
    """

    name: str
    count: int
    value: float = 0.0
    is_whole: bool = False

    @classmethod
    def of(cls, name: str, tensor: Stored) -> Moment:
        """Describe a tensor of an optimizer."""
        if isinstance(tensor, StoredTensor) or tensor.dim():
            return cls(name, tensor.numel())
        return cls(name, 0, float(tensor), not tensor.is_floating_point())

    @property
    def number(self) -> Tensor:
        """The number as a tensor."""
        return torch.tensor(int(self.value)) if self.is_whole else torch.tensor(self.value)


_MOMENT: Final = Record(Moment, "name=moment count value is_whole")
_MOMENTS: Final = Rows(_MOMENT)
MOMENT_OPERATIONS: Final = ("put_moment", "moment", "moments")


def handle_moment(shard: Shard, conn: LanConnection, meta: Meta, payload: Payload) -> Packed:
    """Handle a request of `MOMENT_OPERATIONS`, of a worker that makes the optimizer's steps."""
    name, worker = fields.text(meta, "op"), fields.count(conn.hello, "worker")
    if name == "moments":
        found = sorted(shard.moments(worker).items())
        return _MOMENTS.write([Moment.of(*pair) for pair in found]), None
    if name == "put_moment":
        moment = _MOMENT.read(meta)
        count = moment.count
        value = pushed_gradient(conn, payload, count) if count else moment.number
        shard.put_moment(worker, moment.name, value)
        return {}, None
    value = in_memory(shard.moments(worker)[fields.text(meta, "moment")])
    if conn.shared is None:
        return {}, as_bytes(value.clone())
    shared_gradient(conn.shared, value.numel()).copy_(value)
    return {}, None


OPERATIONS: Final = (
    _row("apply", Shard.apply, _STEP, _NORM),
    _row("mean_sq", Shard.mean_sq, _MEAN, _NORM),
    _row("keep", Shard.keep, _PARTITION, _DONE),
    _row("take_state", Shard.take_state, _PARTITION, _DONE),
    _row("take_moments", Shard.take_moments, _PARTITION, _DONE),
    _row("take_mean", Shard.take_mean, _MEAN, _DONE),
    _row("lose_rows", Shard.lose_rows, _PARTITION, _DONE),
    _row("speak", Shard.outgoing, _NOTHING, _OUTGOING),
    _row("finish", Shard.finish, _NOTHING, _OUTGOING),
    _row("merge", Shard.merge, _REPLY, _DONE),
    _row("snapshot", Shard.snapshot, _CHECKPOINT, _DONE),
    _row("params", Shard.live_params, _NOTHING, _PARAMS),
    _row("write_part", HeldShard.write_part, _CHECKPOINT, _PART),
)
"""Operations of the primary shard on the others. Workers push and pull slices separately."""
_CHANGE: Final = Record(
    Change,
    "version=change",
    Field(
        "pulls",
        Rows(
            Record(Pull, "worker=pullers ticket=tickets version=pull_versions judged=pulls_judged")
        ),
    ),
)
_BY_METHOD: Final = {operation.run: operation for operation in OPERATIONS}


class RemoteShard:
    """See `geo_ray.training.shard.ShardPort`.

    Args:
        client: connection to the shard's server.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, client: LanClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def ask(
        self, operation: Callable[[H, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Let the shard's server execute the one of `OPERATIONS` that runs this method."""
        row = _BY_METHOD[operation]
        (write, _), (_, read) = row.request, row.result
        asked, payload = write(row.name, *arguments)
        if change is not None:
            asked |= _CHANGE.write(change)
        answer: R = read(*self._client.request(asked, payload, timeout_s=self._timeout_s))
        return answer


def read_change(meta: Meta) -> Change | None:
    """Return the change made by a request of the primary shard; None if it makes none."""
    return _CHANGE.read(meta) if "change" in meta else None


_BY_NAME = {operation.name: operation for operation in OPERATIONS}
(_WRITE,) = (operation for operation in OPERATIONS if operation.run is HeldShard.write_part)


class ShardServer:
    """Serves workers (push and fetch of a slice) and the primary shard (`OPERATIONS`).

    Args:
        held: the slice.
    """

    def __init__(self, held: HeldShard) -> None:
        self._held = held
        self._lock = threading.Lock()
        self._attempts: dict[int, int] = {}  # of workers

    def handle(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> Packed:
        """Handle one request; only writing a checkpoint's part takes long."""
        if fields.text(meta, "op") == _WRITE.name and conn.hello.get("role") == "primary":
            (_, read), (write, _) = _WRITE.request, _WRITE.result
            return write(_WRITE.run(self._held, *read(meta, payload)))  # concurrent with others
        with self._lock:
            shard, region, name = self._held.shard, self._held.region, fields.text(meta, "op")
            if name == "put":
                worker = self._admit(conn)
                grad_S = pushed_gradient(conn, payload, shard.params_S.numel())
                shard.put(
                    fields.count(meta, "partition") if "partition" in meta else worker, grad_S
                )
                return {}, None
            if name in MOMENT_OPERATIONS:
                self._admit(conn)
                return handle_moment(shard, conn, meta, payload)
            if name == "fetch":
                pull = read_pull(self._admit(conn), meta)
                return {}, slice_for(conn, shard.fetch(pull))
            if conn.hello.get("role") != "primary":
                raise InvariantError(f"'{name}' is for the primary shard of '{region}'")
            operation = _BY_NAME.get(name)
            if operation is None:
                raise InvariantError(f"unknown operation '{name}' for a shard of '{region}'")
            (_, read), (write, _) = operation.request, operation.result
            arguments, change = read(meta, payload), read_change(meta)
            return write(shard.ask(operation.run, *arguments, change=change))

    def _admit(self, conn: LanConnection) -> int:
        """Return the rank of a worker; refuses an attempt older than the newest one."""
        worker, attempt = fields.count(conn.hello, "worker"), fields.count(conn.hello, "attempt")
        newest = self._attempts[worker] = max(attempt, self._attempts.get(worker, 0))
        if attempt < newest:
            raise LinkDownError(
                f"attempt {attempt} of worker {worker} of region '{self._held.region}' was "
                f"replaced by attempt {newest}"
            )
        return worker


class ShardLink:
    """One worker's connection to one shard, with its slices of the buffers.

    Args:
        client: the connection.
        params_S: the worker's parameters of this slice, fp32 (S,).
        grad_S: the worker's gradient of this slice, fp32 (S,).
        timeout_s: longest wait for other processes; the shard gives up earlier, see `deadlines`.
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
        """Send a request that may push the gradient, and receive the parameters.

        An answer that asks for the worker's state has none.
        """
        answer, payload = self.request(meta, push=push)
        if wanted_state(answer) is None:
            self._take(payload)
        return answer

    def put(self, partition: int | None) -> None:
        """Push the gradient slice, of a share of the step, and wait for the receipt only."""
        self.request(
            {"op": "put"} if partition is None else {"op": "put", "partition": partition}, push=True
        )

    def put_moment(self, moment: Moment, value_S: Tensor) -> None:
        """Send a tensor of the optimizer, or the slice of this shard."""
        payload = None
        if moment.count and self._shared_grad_S is not None:
            self._shared_grad_S[: moment.count].copy_(value_S)
        elif moment.count:
            payload = as_bytes(value_S)
        meta = {"op": "put_moment", **_MOMENT.write(moment)}
        self.client.request(meta, payload, timeout_s=self._timeout_s)

    def moments(self) -> list[Moment]:
        """Return the tensors of the shard's optimizer."""
        meta, _ = self.client.request({"op": "moments"}, timeout_s=self._timeout_s)
        return list(_MOMENTS.read(meta))

    def moment(self, moment: Moment) -> Tensor:
        """Fetch one of them, as a copy."""
        if not moment.count:
            return moment.number
        asked: Meta = {"op": "moment", "moment": moment.name}
        _, payload = self.client.request(asked, timeout_s=self._timeout_s)
        if self._shared_grad_S is not None:
            return self._shared_grad_S[: moment.count].clone()
        return as_tensor(payload, moment.count)

    def fetch(self, pull: Pull) -> None:
        """Fetch the slice of the version that the primary shard announced."""
        self.exchange({"op": "fetch", **pull_meta(pull)}, push=False)

    def exchange_statistics(self, buffers_B: Tensor) -> None:
        """Replace local statistics by those over all regions, once all regions have reported."""
        asked: Meta = {"op": "precise"}
        _, payload = self.client.request(asked, as_bytes(buffers_B), timeout_s=self._timeout_s)
        buffers_B.copy_(torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8))

    def request(self, meta: Meta, *, push: bool) -> tuple[Meta, memoryview | None]:
        """Send a request, which may push the gradient; return the answer and its payload."""
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


class ShardLinks:
    """One worker's connections to all shards, used in parallel.

    Attributes:
        primary: the connection to the primary shard.

    Args:
        links: primary first.
        rank: of the worker.
        pool: uses them all; the owner of its threads ends them.
    """

    def __init__(self, links: Sequence[ShardLink], rank: int, pool: Concurrently) -> None:
        self.primary = links[0]
        self._links = links
        self._rank = rank
        self._pool = pool

    def ask(self, meta: Meta, *, push: bool, partition: int | None = None) -> Meta:
        """Send a request that may push the gradient, and receive the parameters.

        Args:
            meta: the request.
            push: whether it pushes the gradient.
            partition: the part of the step; None: the worker's own.
        """
        if len(self._links) == 1:
            return self.primary.exchange(meta, push=push)
        if push:  # the primary shard may apply it at once, so all shards get it first
            self._pool([partial(link.put, partition) for link in self._links])
        reply, _ = self.primary.request(meta, push=False)
        if wanted_state(reply) is not None:
            return reply
        pull = read_pull(self._rank, reply)
        self._pool([partial(link.fetch, pull) for link in self._links])
        return reply

    def put_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Send the optimizer's tensors; of each vector, a shard gets its slice."""
        for name, value in moments.items():
            parts = [value] * len(self._links)
            if value.dim() and len(parts) > 1:
                parts = [value[a:b] for a, b in split_sizes(value.numel(), len(parts))]
            for link, part in zip(self._links, parts, strict=True):
                link.put_moment(Moment.of(name, part), part)

    def moments(self) -> dict[str, Tensor]:
        """Fetch the optimizer's tensors."""
        parts = [{m.name: link.moment(m) for m in link.moments()} for link in self._links]
        return {
            name: torch.cat([part[name] for part in parts]) if value.dim() else value
            for name, value in parts[0].items()
        }

    def pull(self, *, judged: bool) -> None:
        """Fetch the live parameters, or those to be evaluated."""
        self.ask({"op": "pull", "judged": judged}, push=False)


class WorkerModel:
    """Moves gradients and parameters between a worker and its shards.

    A worker that keeps parameters and optimizer sends neither with a step, but both when the server
    asks for them. One that pushes changes of several steps keeps an optimizer only.

    Args:
        worker: the worker.
        links: its connections.
    """

    def __init__(self, worker: Worker | LocalStepsWorker, links: ShardLinks) -> None:
        self._worker = worker
        is_own = isinstance(worker, Worker) and worker.optimizer is not None
        self._own = worker if isinstance(worker, Worker) and is_own else None
        self._optimizer = worker.optimizer
        self._links = links

    def join(self) -> Meta:
        """Pull the first parameters, and the optimizer's state if the worker keeps it."""
        if self._optimizer is not None:
            self._optimizer.restore(self._links.moments())
        return self._ask({"op": "join"}, push=False)

    def push(self, reports: Sequence[StepReport], partition: int | None) -> Meta:
        """Push a step's gradient, or report steps; return the answer.

        Args:
            reports: of the step; a worker that keeps the parameters may have made several.
            partition: see `ShardLinks.ask`.
        """
        own, report = self._own, report_meta(reports[-1])
        if own is None:
            answer = self._links.ask(report, push=True, partition=partition)
        else:
            meta = report_meta(reports[-1], reports[:-1])
            answer, _ = self._links.primary.request(meta, push=False)
        while (wanted := wanted_state(answer)) is not None:
            if wanted != "model":
                self._put_optimizer()
            if wanted == "optimizer":
                answer = self._ask({"op": "optimizer"}, push=False)
                continue
            if own is None:
                raise InvariantError("a parameter server asked for parameters that it has")
            own.store()
            request: Meta = report | {"has_state": True} if wanted == "push" else {"op": "state"}
            answer = self._ask(request, push=True)
        return answer

    def _put_optimizer(self) -> None:
        if isinstance(self._optimizer, InnerOptimizer):
            live, copies = self._optimizer.live()  # nothing changes it until the answer
            self._links.put_moments(live | copies)
        elif self._optimizer is not None:
            self._links.put_moments(self._optimizer.export())

    @contextmanager
    def judged(self, *, is_outer: bool) -> Iterator[None]:
        """Evaluate the parameters known to the averager if ``is_outer``, else the live ones."""
        own = self._own
        if not is_outer:
            yield
            return
        live = None if own is None else (own.kept(), own.buffers_B.clone())
        self._links.pull(judged=True)
        if own is not None:
            own.load()
        yield
        if own is None or live is None:
            self._links.pull(judged=False)
        else:
            own.keep(live[0])
            own.buffers_B.copy_(live[1])

    def params(self) -> Tensor:
        """Return the parameters that the worker has now, fp32 (P,), on the CPU."""
        return self._worker.params_P if self._own is None else self._own.kept().cpu()

    def _ask(self, meta: Meta, *, push: bool) -> Meta:
        answer = self._links.ask(meta, push=push)
        if self._own is not None and wanted_state(answer) is None:
            self._own.load()
        return answer


def dial_shards(
    addresses: Sequence[Address],
    key: bytes,
    hello: Meta,
    num_params: int,
    *,
    shared: bool = True,
    buffer_floats: int = 0,
    config: LanConfig | None = None,
) -> list[LanClient]:
    """Connect one worker to all shards, primary first.

    Args:
        addresses: addresses of the shards.
        key: key of the run.
        hello: identity of the worker.
        num_params: P.
        shared: offers shared memory.
        buffer_floats: model buffers before the primary shard's slice, counted as fp32 values.
        config: of the connections; None for the defaults.
    """
    pieces = _pieces(num_params, len(addresses), buffer_floats)
    sizes = [shared_bytes(stop - start) if shared else 0 for start, stop in pieces]
    return [
        LanClient(address, key, hello, shared_bytes=size, config=config)
        for address, size in zip(addresses, sizes, strict=True)
    ]


def _pieces(num_params: int, shards: int, buffer_floats: int) -> list[tuple[int, int]]:
    """Return the ranges of the shards' parts in a worker's buffers."""
    slices = [
        (start + buffer_floats, stop + buffer_floats)
        for start, stop in split_sizes(num_params, shards)
    ]
    return [(0, slices[0][1]), *slices[1:]]


def links_over(
    clients: Sequence[LanClient], num_params: int, timeout_s: float, buffer_floats: int = 0
) -> tuple[Tensor, Tensor, list[ShardLink]]:
    """Return one worker's parameters and gradient, fp32 (P,) each, and its links to all shards.

    The vectors are the shared memory itself if there is one shard. Model buffers, counted as fp32
    values, precede both.
    """
    shared, length = clients[0].shared if len(clients) == 1 else None, buffer_floats + num_params
    if shared is None:
        params_P, grad_P = torch.zeros(length), torch.zeros(length)
    else:
        params_P = shared_parameters(shared, length)
        grad_P = shared_gradient(shared, length)
    pieces = _pieces(num_params, len(clients), buffer_floats)
    links = [
        ShardLink(client, params_P[start:stop], grad_P[start:stop], timeout_s)
        for client, (start, stop) in zip(clients, pieces, strict=True)
    ]
    return params_P, grad_P, links
