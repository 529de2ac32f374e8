"""Memory of training in groups: bytes of an accelerator, of a host and of the serving process.

The input is the sizes of the model (`geo_ray.runs.plan_inputs.sizes_of`), so nothing of its size is
allocated. A device holds

- parameters, gradients and optimizer state: all of them, or with FSDP the shard of a rank, padded
  to equal first dimensions as `fully_shard` does;
- parameters and gradients that FSDP has gathered at the peak of the backward pass: the root unit,
  two further units, and the buffers of the collectives;
- activations, and a reserve for the context and the libraries.

A rank's host holds the strategy's vectors of the rank's slice and the messages of an exchange; the
serving process holds the averagers' vectors and one update of each region. Both are multiples of
the number of exchanged parameters (`ExchangeMemory`), which are measured on a small vector with the
strategy's and the codec's own code.

Sizes of parameters, gradients, optimizer state and of the exchange are exact. Gathered parameters
are an upper estimate by the rule above, checked against `torch.distributed._tools`. Activations are
measured or given. The reserves are assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from geo_ray.base.errors import ModelTooLargeError
from geo_ray.base.text import bytes_text

Sharding = Literal["none", "ddp", "fsdp", "hsdp"]

FP32_BYTES: Final = 4
CONTEXT_BYTES: Final = 1.5e9
"""Assumed memory of an accelerator for its context, NCCL and library workspaces."""
FRAGMENTED: Final = 0.05
"""Assumed part of an accelerator's memory that its allocator cannot use."""
PROCESS_BYTES: Final = 0.6e9
"""Assumed memory of a process with Python, PyTorch and this library; measured on CPU: 0.5 GB."""

_MOST_DOUBLINGS: Final = 11  # of the number of ranks

ESTIMATED: Final = frozenset({"gathered", "activations", "reserve", "process"})
"""Terms that are estimated, assumed or given; all others are exact."""


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """Size of one parameter.

    Attributes:
        shape: shape.
        item_bytes: bytes of an element.
        trained: whether it has a gradient and is exchanged.
    """

    shape: tuple[int, ...]
    item_bytes: int = FP32_BYTES
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def sharded(self, shards: int) -> int:
        """Return the largest number of elements of a rank, which all ranks allocate."""
        if shards == 1 or not self.shape:
            return self.size
        return -(-self.shape[0] // shards) * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model's parameters.

    Attributes:
        root: parameters that FSDP gathers for the whole forward and backward pass.
        units: parameters that it gathers together and frees again, by unit.
        buffer_bytes: buffers, which are not sharded.
    """

    root: tuple[ParameterSize, ...]
    units: tuple[tuple[ParameterSize, ...], ...] = ()
    buffer_bytes: int = 0

    @property
    def parameters(self) -> Iterator[ParameterSize]:
        """All parameters."""
        yield from self.root
        for unit in self.units:
            yield from unit

    @property
    def num_trained(self) -> int:
        """Number of trained parameters, which are exchanged."""
        return sum(each.size for each in self.parameters if each.trained)

    @property
    def num_params(self) -> int:
        """Number of all parameters."""
        return sum(each.size for each in self.parameters)


@dataclass(frozen=True, slots=True)
class OptimizerSize:
    """State of an optimizer.

    Attributes:
        states: values per trained parameter.
        item_bytes: bytes of a value; None: as the parameter.
        temporary: values per trained parameter that a step allocates in addition; 1 for AdamW with
            ``foreach`` (the default on accelerators), 0 if ``fused``.
    """

    states: float = 2.0
    item_bytes: int | None = None
    temporary: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the ranks of a region hold the model.

    Attributes:
        sharding: ``none``: one rank. ``ddp``: every rank holds all. ``fsdp``: sharded over all
            ranks. ``hsdp``: sharded within each of several replicas.
        ranks: number of ranks.
        replicas: replicas of ``hsdp``.
        ranks_per_host: ranks of one machine.
        compute_bytes: bytes of an element of gathered parameters (`MixedPrecisionPolicy`); None: as
            stored.
        reduce_bytes: bytes of an element of gradients that are reduced; None: as computed.
        bucket_view: whether ``ddp`` keeps gradients in its buckets (``gradient_as_bucket_view``).
    """

    sharding: Sharding = "none"
    ranks: int = 1
    replicas: int = 1
    ranks_per_host: int = 1
    compute_bytes: int | None = None
    reduce_bytes: int | None = None
    bucket_view: bool = False

    @property
    def shards(self) -> int:
        """Number of different parts of the model."""
        if self.sharding == "fsdp":
            return self.ranks
        return self.ranks // self.replicas if self.sharding == "hsdp" else 1

    @property
    def hosts(self) -> int:
        """Number of machines."""
        return -(-self.ranks // self.ranks_per_host)


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """Bytes per exchanged parameter that a strategy and its codecs hold; see `memory_probe`.

    Attributes:
        rank_rest: of a rank's slice, between two exchanges.
        rank_peak: the same at the peak of an exchange.
        server_rest: of the serving process, between two rounds, with all regions.
        server_peak: the same at the peak of a round.
        rank_end: of a rank's slice at the end of the run, when it sends its parameters.
    """

    rank_rest: float
    rank_peak: float
    server_rest: float
    server_peak: float
    rank_end: float = 0.0


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of a step.

    Attributes:
        row_bytes: bytes of each row of a rank's micro-batch.
        rows: rows of a rank's micro-batch.
    """

    row_bytes: float
    rows: int = 1


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes that a group and its serving process need, by term.

    Attributes:
        device: of one rank on its device. On a CPU, the host's memory.
        host: of one rank on its host, in addition.
        server: of the serving process.
        layout: how the ranks hold the model.
        on_accelerator: whether the device has its own memory.
    """

    device: Mapping[str, float]
    host: Mapping[str, float]
    server: Mapping[str, float]
    layout: GroupLayout = GroupLayout()
    on_accelerator: bool = True

    @property
    def device_bytes(self) -> float:
        """Bytes of one rank's accelerator; 0 on a CPU."""
        return sum(self.device.values()) if self.on_accelerator else 0.0

    @property
    def rank_bytes(self) -> float:
        """Bytes of one rank on its host."""
        own = 0.0 if self.on_accelerator else sum(self.device.values())
        return own + sum(self.host.values())

    @property
    def host_bytes(self) -> float:
        """Bytes of all ranks of one host."""
        return self.rank_bytes * min(self.layout.ranks, self.layout.ranks_per_host)

    @property
    def server_bytes(self) -> float:
        """Bytes of the serving process."""
        return sum(self.server.values())


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of the ranks of a region that train a model, and of the process that serves the run.

    Attributes:
        model: outline of the model.
        optimizer: the optimizer's state.
        layout: how the ranks hold the model.
        exchange: memory of the strategy and codecs.
        activations: activations; None: unknown, and not counted.
        on_accelerator: whether ranks train on accelerators.
    """

    model: ModelSizes
    optimizer: OptimizerSize
    layout: GroupLayout
    exchange: ExchangeMemory
    activations: Activations | None = None
    on_accelerator: bool = True

    def memory(self) -> GroupMemory:
        """Return the bytes by term."""
        exchanged, exchange = self.exchanged_per_rank, self.exchange
        rank_peak = max(exchange.rank_peak, exchange.rank_end)
        host = {
            "strategy": exchanged * exchange.rank_rest,
            "messages": exchanged * (rank_peak - exchange.rank_rest),
            "process": PROCESS_BYTES,
        }
        whole = float(self.model.num_trained)
        server = {
            "model": FP32_BYTES * whole,
            "strategy": whole * exchange.server_rest,
            "messages": whole * (exchange.server_peak - exchange.server_rest),
            "process": PROCESS_BYTES,
        }
        return GroupMemory(self.device(), host, server, self.layout, self.on_accelerator)

    @property
    def exchanged_per_rank(self) -> float:
        """Return the largest number of parameters that one rank exchanges.

        Ranks that hold the same part exchange equal parts of it.
        """
        layout = self.layout
        held = sum(p.sharded(layout.shards) for p in self.model.parameters if p.trained)
        return math.ceil(held / max(1, layout.ranks // layout.shards))

    def device(self) -> dict[str, float]:
        """Return the bytes of one rank's device by term, at the peak of a step."""
        shards, optimizer = self.layout.shards, self.optimizer
        parameters = gradients = states = temporary = 0.0
        for each in self.model.parameters:
            held = each.sharded(shards)
            parameters += held * each.item_bytes
            if each.trained:
                gradients += held * each.item_bytes
                states += optimizer.states * held * (optimizer.item_bytes or each.item_bytes)
                temporary += optimizer.temporary * held * each.item_bytes
        if self.layout.sharding == "ddp" and not self.layout.bucket_view:
            gradients *= 2
        found = {
            "parameters": parameters,
            "buffers": float(self.model.buffer_bytes),
            "gradients": gradients,
            "optimizer": states,
        }
        # The peak is inside a unit or at the end of the backward pass, or in the optimizer's step.
        activations = self.activations
        saved = 0.0 if activations is None else activations.row_bytes * activations.rows
        in_unit, at_end = self._gathered()
        if in_unit + saved >= max(at_end, temporary):
            found |= {"gathered": in_unit, "activations": saved}
        elif at_end >= temporary:
            found["gathered"] = at_end
        else:
            found["temporary"] = temporary
        if self.on_accelerator:
            found["reserve"] = CONTEXT_BYTES
        return {name: value for name, value in found.items() if value}

    def _gathered(self) -> tuple[float, float]:
        """Return what FSDP holds in addition to the shards.

        Returns:
            The bytes during the backward pass of a unit, when the root's gradients exist and its
            shards' do not; and the bytes when the root's gradients are reduced, after all units.
        """
        layout = self.layout
        if layout.sharding not in ("fsdp", "hsdp"):
            return 0.0, 0.0

        def whole(unit: Sequence[ParameterSize], *, trained: bool = False) -> float:
            sizes = (p.size * self._compute_bytes(p) for p in unit if p.trained or not trained)
            return float(sum(sizes))

        def reduced(unit: Sequence[ParameterSize]) -> float:
            sizes = (
                p.size * (layout.reduce_bytes or self._compute_bytes(p)) for p in unit if p.trained
            )
            return float(sum(sizes))

        root, units = self.model.root, self.model.units
        own, gradients = whole(root), whole(root, trained=True)
        shards = float(sum(p.sharded(layout.shards) * p.item_bytes for p in root if p.trained))
        # its parameters, those of the next one in two buffers at most, its gradients twice
        largest = max((whole(unit) for unit in units), default=0.0)
        unit_gradients = max((whole(unit, trained=True) for unit in units), default=0.0)
        unit_reduced = max((reduced(unit) for unit in units), default=0.0)
        in_unit = own + gradients + 2 * largest + unit_gradients + unit_reduced - shards
        at_end = max(own + gradients - shards, gradients + reduced(root)) + unit_reduced
        return in_unit, at_end

    def _compute_bytes(self, parameter: ParameterSize) -> int:
        return self.layout.compute_bytes or parameter.item_bytes

    def check(
        self,
        what: str,
        device_gb: float | None = None,
        host_gb: float | None = None,
    ) -> GroupMemory:
        """Refuse a group that does not fit, before any machine is bought.

        Args:
            what: the group, for messages, such as ``region 'us'``.
            device_gb: memory of an accelerator; None: not checked.
            host_gb: memory of a machine; None: not checked.

        Returns:
            The memory that is needed.

        Raises:
            ModelTooLargeError: states the terms, and a change that would fit.
        """
        found = self.memory()
        if device_gb is not None and self.on_accelerator:
            has = device_gb * 1e9 * (1 - FRAGMENTED)
            if found.device_bytes > has:
                raise ModelTooLargeError(
                    f"{what}: a rank needs {terms_text(found.device)} on its accelerator, which "
                    f"has {device_gb:g} GB, {bytes_text(has)} of them usable",
                    fix=self._fix(has),
                )
        if host_gb is not None and found.host_bytes > host_gb * 1e9:
            ranks = min(self.layout.ranks, self.layout.ranks_per_host)
            terms = found.host if self.on_accelerator else {**found.device, **found.host}
            raise ModelTooLargeError(
                f"{what}: the {ranks} ranks of a machine need {bytes_text(found.host_bytes)} of "
                f"its memory, each {terms_text(terms)}; it has {host_gb:g} GB",
                fix="Use machines with more memory, more machines with FSDP, or a strategy that "
                "keeps fewer vectors.",
            )
        return found

    def _fix(self, has: float) -> str:
        """Return the smallest change that makes a rank fit into some bytes."""
        layout, rows = self.layout, 0 if self.activations is None else self.activations.rows
        most = self._most_rows(has)
        if most:
            return f"Use at most {most} rows per rank at a time, with train.accumulate."
        if layout.sharding in ("none", "ddp") and layout.ranks > 1:
            sharded = replace(self, layout=replace(layout, sharding="fsdp"))
            if sharded._most_rows(has) == rows:
                return "Shard the model with fsdp."
        for ranks in (layout.ranks * 2**n for n in range(_MOST_DOUBLINGS)):
            sharded = replace(self, layout=replace(layout, sharding="fsdp", ranks=ranks))
            most = sharded._most_rows(has)
            if most is not None:
                also = f", at most {most} rows per rank" if most < rows else ""
                return f"Use {ranks} ranks with fsdp{also}, or accelerators with more memory."
        return (
            "More ranks do not help: use smaller units of the model, activation checkpointing, or "
            "accelerators with more memory."
        )

    def _most_rows(self, has: float) -> int | None:
        """Return the rows, at most the present ones, with which a rank fits; None if none do."""
        activations = self.activations
        if activations is None:
            return 0 if sum(self.device().values()) <= has else None
        for rows in range(activations.rows, 0, -1):
            fewer = replace(self, activations=replace(activations, rows=rows))
            if sum(fewer.device().values()) <= has:
                return rows
        return None


def terms_text(terms: Mapping[str, float]) -> str:
    """Return terms and their sum: ``30.1 GB (parameters 10.4 GB, activations about 9 GB)``."""
    parts = [
        f"{name} {'about ' if name in ESTIMATED else ''}{bytes_text(value)}"
        for name, value in terms.items()
        if value
    ]
    return f"{bytes_text(sum(terms.values()))} ({', '.join(parts)})"
