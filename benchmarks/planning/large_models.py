"""Models of 1.3 B and 6.7 B parameters on paper: memory, bytes and seconds of a round.

Nothing of such a size is allocated. Sizes come from the models on the meta device and from the
memory model (`geo_ray.planner.memory`). What is measured here, on small vectors and in one process:
bytes of encoded updates and answers of a small model with the same kinds of tensors, cut into the
slices of eight FSDP ranks, and processor time per parameter of each stage of an exchange. Compute
time is an assumption. `--tables FILE.md` writes the tables of the page.
"""

from __future__ import annotations

import json
import queue
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import support
from benchmarks.common.transformer import Block
from geo_ray.codecs.powersgd import parts_of
from geo_ray.codecs.registry import CODECS
from geo_ray.joining.layout import Layout, Ranges, Slice, box_ranges, shapes_in
from geo_ray.joining.protocol import JoinTerms
from geo_ray.joining.rank import JoinedModel, RankExchange, SliceWire
from geo_ray.planner.memory import (
    Activations,
    ExchangeMemory,
    GroupLayout,
    GroupMemory,
    MemoryModel,
    ModelSizes,
    OptimizerSize,
)
from geo_ray.planner.timing import Pattern
from geo_ray.runs.memory_probe import exchange_memory
from geo_ray.runs.plan_inputs import sizes_of
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import AnyStrategy, CodecConfig
from geo_ray.telemetry.throughput import peak_flops
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.wire.message import EndpointIdentity, Message

GPUS, HOST_GB = 8, 2048
CONTEXT, VOCABULARY = 2048, 50257
MICRO_ROWS = 4
TOKENS = 2**19
MFU = 0.40
INTERVAL = 100
GBITS = (1, 5, 10)
ROUND_TRIP_S = 0.08
REGIONS = 2
SIZES: Final = {"1.3 B": (2048, 24), "6.7 B": (4096, 32)}
SMALL: Final = (256, 4, 8192)  # width, layers, vocabulary

CODECS_OF: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]]] = {
    "none": ("diloco", {}, {}),
    "bf16": ("diloco", {"kind": "bf16"}, None),
    "int8": ("diloco", {"kind": "int8"}, None),
    "int4": ("diloco", {"kind": "int4"}, None),
    "powersgd, rank 32": ("diloco", {"kind": "powersgd", "rank": 32}, None),
    "topk 1 %": ("diloco", {"kind": "topk", "ratio": 0.01}, None),
    "sparseloco": ("sparseloco", {"kind": "chunked_topk"}, {"kind": "nonzeros"}),
}
"""Strategy, codec of updates, and codec of answers; None: the same."""
STRATEGIES: Final = {
    "diloco": {"kind": "diloco", "interval": INTERVAL},
    "diloco_streaming": {
        "kind": "diloco_streaming",
        "interval": INTERVAL,
        "fragments": 4,
        "tau": 20,
    },
    "one_step_delay": {"kind": "one_step_delay", "interval": INTERVAL},
    "diloco_eager": {"kind": "diloco_eager", "interval": INTERVAL},
}
OLD: Final = {"1.3 B": (7.0, 168.0), "6.7 B": (36.0, 870.0)}
"""Before: seconds of host work per step, and GB of host memory per region, of eight workers."""


class Gpt(nn.Module):
    """A decoder with tied embeddings, as GPT-2 and GPT-3 have it."""

    def __init__(self, width: int, layers: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


def on_meta(width: int, layers: int, vocabulary: int = VOCABULARY) -> Gpt:
    """Return a model without values."""
    with torch.device("meta"):
        return Gpt(width, layers, vocabulary)


def strategy_of(values: Mapping[str, Any]) -> Strategy:
    """Return a strategy from plain values."""
    found: Strategy = TypeAdapter(AnyStrategy).validate_python(dict(values))
    return found


def codecs_of(name: str) -> CodecConfig:
    """Return the codecs of a row of the tables."""
    _, up, down = CODECS_OF[name]
    values = {"up": up or None, "down": (up if down is None else down) or None}
    return CodecConfig.model_validate(values)


def shares_of(layout: Layout, shards: int) -> list[Ranges]:
    """Return the ranges of each FSDP rank: the rows of each parameter, as `torch.chunk` cuts."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    for index, each in enumerate(layout.parameters):
        rows = -(-each.shape[0] // shards)
        for rank in range(shards):
            first = min(each.shape[0], rank * rows)
            extent = (min(rows, each.shape[0] - first), *each.shape[1:])
            offset = (first, *(0 for _ in each.shape[1:]))
            found[rank] += box_ranges(each.shape, offset, extent, layout.start(index))
    return [tuple(ranges) for ranges in found]


class _Memory:
    """A rank's parameters in place of a module."""

    def __init__(self, size: int) -> None:
        self.size, self.module_S, self.params_S = size, torch.zeros(size), torch.empty(size)

    def read(self) -> Tensor:
        return self.params_S.copy_(self.module_S)

    def write(self, params_S: Tensor) -> None:
        self.module_S.copy_(params_S)

    def release(self) -> None:
        pass


@dataclass
class Exchanges:
    """Bytes and seconds of exchanges of one slice.

    Attributes:
        up_bytes: payload of each update.
        down_bytes: payload of each answer.
        seconds: one core's time for each stage in each round: ``read`` (the loop waits),
            ``encode``, ``server`` (all regions), ``decode``, ``merge`` (the loop waits).
    """

    up_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)


def exchanged(name: str, layout: Layout, ranges: Ranges, rounds: int) -> Exchanges:
    """Run rounds of all regions for one slice; the first round is not counted."""
    kind, size = CODECS_OF[name][0], sum(b - a for a, b in ranges)
    regions = tuple(f"r{number}" for number in range(REGIONS))
    terms = JoinTerms(
        name="paper",
        regions=regions,
        strategy=strategy_of({"kind": kind, "interval": 1}),
        codec=codecs_of(name),
        steps=rounds + 5,
    )
    found = Exchanges()
    averager = terms.averager(layout, Slice(ranges, dict.fromkeys(regions, 0)))
    memories = {region: _Memory(size) for region in regions}
    ranks = {}
    for region in regions:
        model = JoinedModel(terms.strategy, memories[region], terms.bounds_in(ranges, layout.size))
        model.start()
        wire = RegionWire(terms.wire_plan(layout, ranges), region, size)
        slices = [SliceWire(0, ((0, size),), wire)]
        ranks[region] = RankExchange(terms.server_plan(region, 1), model, slices=slices)
    generator = torch.Generator().manual_seed(0)
    for number in range(rounds + 1):
        timer = _Timer()
        updates, replies = [], []
        for region, rank in ranks.items():
            memories[region].module_S.add_(torch.randn(size, generator=generator), alpha=1e-3)
            with timer.of(f"read {region}"):
                (sent,) = rank.step(1, 1.0)
            with timer.of(f"encode {region}"):
                updates += rank.encoded(sent.update)
        with timer.of("server"):
            for update in updates:
                replies += averager.on_update(averager.checked(update))
        for reply in replies:
            rank = ranks[reply.to]
            with timer.of(f"decode {reply.to}"):
                decoded = rank.slices[0].wire.decode(reply)
            with timer.of(f"merge {reply.to}"):
                rank.on_replies([decoded], 1.0)
        if number:
            found.up_bytes += [update.size_bytes for update in updates]
            found.down_bytes += [reply.size_bytes for reply in replies]
            for stage in ("read", "encode", "server", "decode", "merge"):
                own = [s for what, s in timer.seconds.items() if what.split()[0] == stage]
                found.seconds.setdefault(stage, []).append(statistics.mean(own))
    return found


class _Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, what: str) -> _Timed:
        return _Timed(self, what)


class _Timed:
    def __init__(self, timer: _Timer, what: str) -> None:
        self._timer, self._what = timer, what

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._timer.seconds[self._what] = time.thread_time() - self._began_s


def layer_bytes(width: int) -> float:
    """Return the bytes that the backward pass of a layer needs for a row, in bf16.

    Attention counts as a fused kernel: it saves its inputs, its output and one number per head and
    token.
    """
    heads = width // 128
    with torch.device("meta"):
        block = Block(width).to(torch.bfloat16)
        block.heads = heads
        x = torch.empty(1, CONTEXT, width, dtype=torch.bfloat16, requires_grad=True)
    known = {p.untyped_storage()._cdata for p in block.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def fused(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        out: Tensor = _Fused.apply(q, k, v)
        return out

    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = block(x)
    finally:
        functional.scaled_dot_product_attention = plain
    del out
    return float(sum(each.untyped_storage().nbytes() for each in saved.values()))


class _Fused(torch.autograd.Function):
    """What a fused attention kernel saves."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a tensor of the output's shape."""
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        context.save_for_backward(q, k, v, out, sums)
        return out


def row_bytes(width: int, layers: int, layer: float) -> tuple[float, float]:
    """Return the activations of a row without, and with, a checkpoint at each layer's input.

    Logits in bf16 and their softmax in fp32 count in both.
    """
    logits = CONTEXT * VOCABULARY * (2 + 4)
    inputs = CONTEXT * width * 2
    return layers * layer + logits, layers * inputs + layer + logits


# ------------------------------------------------------------------------------ the paper part

_HOSTS: Final = (
    ("diloco", "none"),
    ("diloco", "int4"),
    ("diloco_streaming", "int4"),
    ("one_step_delay", "int4"),
    ("diloco_eager", "int4"),
)
_EXCHANGES: Final = [(*each, regions) for each in _HOSTS for regions in (REGIONS, 4)]
_HELD: Final = ("rank at rest", "rank at the peak", "server at rest", "server at the peak")


def _named(strategy: str, codec: str, regions: int) -> str:
    return f"{strategy}, {codec}, {regions} regions"


@dataclass(frozen=True)
class Measured:
    """What the record contains.

    Attributes:
        bits: bits per parameter of updates and answers, by row of `CODECS_OF`.
        ns: nanoseconds per parameter of each stage, by row.
        layer: bytes of a layer's activations, by width.
        exchange: vectors of strategies and codecs, by strategy, codec and number of regions.
        transport_ns: nanoseconds per byte of one core at one end of a connection with TLS.
    """

    bits: Mapping[str, tuple[float, float]]
    ns: Mapping[str, Mapping[str, float]]
    layer: Mapping[int, float]
    exchange: Mapping[tuple[str, str, int], ExchangeMemory]
    transport_ns: float = 0.0

    @classmethod
    def of(cls, figures: Sequence[Mapping[str, Any]]) -> Measured:
        """Read the figures of a record."""
        values = {str(each["name"]): float(each["value"]) for each in figures}
        bits = {
            name: (values[f"bits of updates, {name}"], values[f"bits of answers, {name}"])
            for name in CODECS_OF
        }
        ns = {
            name: {
                stage: values[f"ns of {stage}, {name}"]
                for stage in ("read", "encode", "server", "decode", "merge")
            }
            for name in CODECS_OF
        }
        layer = {width: values[f"activations of a layer, {width}"] for width, _ in SIZES.values()}
        exchange = {
            key: ExchangeMemory(*(values[f"{what}, {_named(*key)}"] for what in _HELD))
            for key in _EXCHANGES
        }
        return cls(bits, ns, layer, exchange, values["ns per byte of the transport"])


@dataclass(frozen=True)
class Paper:
    """One model, with all assumptions.

    Attributes:
        name: its size.
        measured: the measurements.
        mfu: assumed utilisation.
        tokens: assumed tokens of a region's step.
    """

    name: str
    measured: Measured
    mfu: float = MFU
    tokens: int = TOKENS

    @property
    def sizes(self) -> ModelSizes:
        """Its parameters."""
        return sizes_of(on_meta(*SIZES[self.name]))

    @property
    def num_params(self) -> int:
        """P."""
        width, layers = SIZES[self.name]
        per_layer = 12 * width**2 + 13 * width
        return layers * per_layer + (VOCABULARY + CONTEXT) * width + 2 * width

    @property
    def step_s(self) -> float:
        """Seconds of a region's step: 6 P + 12 L T D operations per token (PaLM, appendix B)."""
        width, layers = SIZES[self.name]
        per_token = 6 * self.num_params + 12 * layers * CONTEXT * width
        flops = peak_flops("H100") or 0.0
        return per_token * self.tokens / (GPUS * flops * self.mfu)

    def memory(
        self, strategy: str, codec: str, regions: int = REGIONS, *, bf16: bool = False
    ) -> GroupMemory:
        """Return the memory of a region and of the serving process."""
        width, layers = SIZES[self.name]
        sizes = self.sizes
        if bf16:
            half = [tuple(replace(p, item_bytes=2) for p in u) for u in (sizes.root, *sizes.units)]
            sizes = ModelSizes(half[0], tuple(half[1:]))
        _, checkpointed = row_bytes(width, layers, self.measured.layer[width])
        layout = GroupLayout("fsdp", GPUS, ranks_per_host=GPUS, compute_bytes=2, reduce_bytes=4)
        exchange = self.measured.exchange[strategy, codec, regions]
        rows = Activations(checkpointed, MICRO_ROWS)
        return MemoryModel(sizes, OptimizerSize(2), layout, exchange, rows).memory()

    def bytes_of(self, codec: str) -> tuple[float, float]:
        """Return the bytes of a region's update and answer."""
        bits = self.measured.bits[codec]
        if codec.startswith("powersgd"):
            bits = (powersgd_bits(self.name), powersgd_bits(self.name))
        return bits[0] * self.num_params / 8, bits[1] * self.num_params / 8

    def work_s(self, codec: str) -> dict[str, float]:
        """Return the seconds of each stage: ranks share the stages of a region."""
        ns = self.measured.ns[codec]
        each = {"server": 1} | dict.fromkeys(("read", "encode", "decode", "merge"), GPUS)
        return {stage: ns[stage] * 1e-9 * self.num_params / each[stage] for stage in ns}

    def link_s(self, codec: str, gbits: float) -> float:
        """Return the seconds of a round on the link: the update, and then the answer.

        One core of the server sends and receives for all regions.
        """
        per_byte_s = max(8e-9 / gbits, REGIONS * self.measured.transport_ns * 1e-9)
        return sum(self.bytes_of(codec)) * per_byte_s + ROUND_TRIP_S

    def round_s(self, codec: str, gbits: float) -> float:
        """Return the seconds of a round with its work, one after the other."""
        return self.link_s(codec, gbits) + sum(self.work_s(codec).values())

    def lost(self, strategy: str, codec: str, gbits: float, interval: int = INTERVAL) -> float:
        """Return the fraction of time that exchanges cost, by the planner's model of time.

        The loop always waits while its parameters are read and merged.
        """
        values = {**STRATEGIES[strategy], "interval": interval}
        traits = strategy_of(values).traits.exchange
        hidden = {} if traits.hidden_steps is None else {interval: traits.hidden_steps}
        timing = Pattern(
            traits.blocking, "rest", traits.fragments, every={interval: traits.every}, hidden=hidden
        ).timing(interval)
        steps = 1000.0 * interval
        seconds = self.round_s(codec, gbits) - ROUND_TRIP_S
        seconds = seconds / traits.fragments + ROUND_TRIP_S
        pace = max(a * seconds + b * self.step_s for a, b in timing.lines(steps))
        work = self.work_s(codec)
        if traits.blocking != "always":  # each fragment reads and writes the whole model
            pace += traits.fragments * (work["read"] + work["merge"]) / interval
        return 1 - self.step_s / pace


@cache
def powersgd_bits(name: str) -> float:
    """Return the bits per parameter of `powersgd`: thin matrices of the slices of all ranks."""
    layout = Layout.of(on_meta(*SIZES[name]))
    return 32 * _powersgd_values(layout) / layout.size


def _powersgd_values(layout: Layout, shards: int = GPUS) -> int:
    rank = int(CODECS_OF["powersgd, rank 32"][1]["rank"])
    total = 0
    for ranges in shares_of(layout, shards):
        shapes = shapes_in(layout, ranges)
        size = sum(b - a for a, b in ranges)
        total += sum(part.sent for part in parts_of(size, shapes, rank))
    return total


def tables(measured: Measured) -> str:
    """Return all tables of the page as Markdown."""
    parts = [f"<!-- {name} -->\n\n{text}" for name, text in _tables(measured)]
    return "\n\n".join(parts) + "\n"


def _tables(measured: Measured) -> Iterator[tuple[str, str]]:
    papers = {name: Paper(name, measured) for name in SIZES}
    yield "device", _device_table(papers)
    yield "host", _host_table(papers)
    yield "bytes", _bytes_table(papers)
    yield "seconds", _seconds_table(papers)
    yield "work", _work_table(papers)
    yield "lost", _lost_table(papers)
    yield "interval", _interval_table(papers)
    yield "sensitivity", _sensitivity_table(papers)


_TERMS = ("parameters", "gradients", "optimizer", "gathered", "activations", "reserve")


def _device_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for name, paper in papers.items():
        for bf16 in (False, True):
            found = paper.memory("diloco", "none", bf16=bf16)
            terms = [f"{found.device.get(term, 0.0) / 1e9:.2f}" for term in _TERMS]
            kind = "bf16" if bf16 else "fp32, computes in bf16"
            rows.append([name, kind, *terms, f"{found.device_bytes / 1e9:.1f}"])
    head = ["model", "parameters in", "parameters", "gradients", "AdamW", "gathered"]
    return _markdown([*head, "activations", "reserve", "GB per GPU"], rows)


def _host_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for name, paper in papers.items():
        for strategy, codec in _HOSTS:
            two = paper.memory(strategy, codec)
            four = paper.memory(strategy, codec, 4)
            numbers = (
                sum(two.host[term] for term in ("strategy", "process")) * GPUS,
                two.host_bytes,
                two.server_bytes,
                four.server_bytes,
            )
            rows.append([name, strategy, codec, *(f"{value / 1e9:.1f}" for value in numbers)])
        rows.append([name, "before", "none", "", f"{OLD[name][1]:.0f}", "in a region", ""])
    head = ["model", "strategy", "codec", "between exchanges", "at the peak"]
    return _markdown([*head, "server, 2 regions", "server, 4 regions"], rows)


def _bytes_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for codec in CODECS_OF:
        row = [codec]
        for paper in papers.values():
            row += [f"{count / 1e9:.3g}" for count in paper.bytes_of(codec)]
        rows.append(row)
    head = ["codec"]
    for name in papers:
        head += [f"{name}: update", "answer"]
    return _markdown(head, rows)


def _seconds_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for codec in CODECS_OF:
        row = [codec]
        for paper in papers.values():
            row += [_seconds(paper.round_s(codec, gbits)) for gbits in GBITS]
        rows.append(row)
    head = ["codec", *(f"{name}: {gbits} Gbit/s" for name in papers for gbits in GBITS)]
    return _markdown(head, rows)


def _work_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for codec in CODECS_OF:
        row = [codec]
        for paper in papers.values():
            work = paper.work_s(codec)
            loop = work["read"] + work["merge"]
            rank = work["encode"] + work["decode"]
            row += [_seconds(loop), _seconds(rank), _seconds(work["server"])]
        rows.append(row)
    head = ["codec"]
    for name in papers:
        head += [f"{name}: loop waits", "encode, decode", "server"]
    return _markdown(head, rows)


def _lost_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for name, paper in papers.items():
        for codec in ("none", "int8", "int4", "sparseloco"):
            for gbits in GBITS:
                row = [name, codec, str(gbits)]
                for strategy in STRATEGIES:
                    if codec == "sparseloco" and strategy != "diloco":
                        row.append("")
                        continue
                    row.append(_percent(paper.lost(strategy, codec, gbits)))
                rows.append(row)
    names = [f"`{name}`" for name in STRATEGIES]
    return _markdown(["model", "codec", "Gbit/s", *names], rows)


def _interval_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for name, paper in papers.items():
        for codec in ("none", "int8", "int4"):
            row = [name, codec]
            for gbits in GBITS:
                seconds = paper.round_s(codec, gbits)
                blocking = 19 * seconds / paper.step_s  # 5 % of the time
                hidden = seconds / paper.step_s
                row.append(f"{_count(blocking)} / {_count(hidden)}")
            rows.append(row)
    return _markdown(["model", "codec", *(f"{gbits} Gbit/s" for gbits in GBITS)], rows)


def _sensitivity_table(papers: Mapping[str, Paper]) -> str:
    rows = []
    for name, paper in papers.items():
        for mfu in (0.3, 0.4, 0.5):
            for tokens in (2**18, 2**19, 2**20):
                other = replace(paper, mfu=mfu, tokens=tokens)
                row = [name, f"{mfu:.0%}", f"{tokens / 2**20:g} M", _seconds(other.step_s)]
                row += [_percent(other.lost("diloco", "int4", gbits)) for gbits in GBITS]
                row += [_percent(other.lost("one_step_delay", "int4", gbits)) for gbits in GBITS]
                rows.append(row)
    head = ["model", "MFU", "tokens", "step"]
    head += [f"`diloco`, {gbits} Gbit/s" for gbits in GBITS]
    head += [f"`one_step_delay`, {gbits}" for gbits in GBITS]
    return _markdown(head, rows)


def _count(steps: float) -> str:
    return str(max(1, -int(-steps // 1)))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.0995 else f"{100 * fraction:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ------------------------------------------------------------------------------ measurements


def measured_bits(name: str, rounds: int) -> tuple[float, float, float]:
    """Return bits per parameter of updates and answers, and bits by the codec's own rule.

    The model is small, and cut into the slices of eight FSDP ranks.
    """
    width, layers, vocabulary = SMALL
    layout = Layout.of(on_meta(width, layers, vocabulary))
    up = down = 0.0
    for ranges in shares_of(layout, GPUS):
        found = exchanged(name, layout, ranges, rounds)
        up += statistics.mean(found.up_bytes)
        down += statistics.mean(found.down_bytes)
    kind = CODECS_OF[name][1].get("kind")
    rule = 32.0 if kind is None else CODECS[kind](**CODECS_OF[name][1]).traits.bits_per_value
    if kind == "powersgd":
        rule = 32 * _powersgd_values(layout) / layout.size
    return 8 * up / layout.size, 8 * down / layout.size, rule


def transport_ns(megabytes: int = 256, pieces: int = 8) -> float:
    """Return the processor time per byte at one end of a connection with TLS, over loopback."""
    authority, key = Authority.create("benchmark"), secrets.token_bytes(32)
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def endpoint(name: str) -> Endpoint:
        identity = EndpointIdentity("run", name, 1, key)
        certificate = authority.issue(name)
        return Endpoint(
            identity, lambda _, message: arrived.put(len(message.payload)), certificate=certificate
        )

    server, rank = endpoint("server"), endpoint("rank")
    try:
        rank.connect("server", server.listen("127.0.0.1", 0))
        rank.wait_connected(["server"], 20.0)
        payload = memoryview(bytes(megabytes * 1_000_000 // pieces))
        began_s = time.process_time()
        for _ in range(pieces):
            rank.send("server", Message("update", {}, payload, "update"))
        count = sum(arrived.get(timeout=120.0) for _ in range(pieces))
        return 1e9 * (time.process_time() - began_s) / count / 2
    finally:
        rank.close(0.0)
        server.close(0.0)


def exchange_figures() -> list[support.Figure]:
    """Return the bytes per parameter that both ends hold for exchanges."""
    figures = []
    for strategy, codec, regions in _EXCHANGES:
        values = STRATEGIES[strategy] | {"interval": 8}  # its length does not matter
        values |= {"tau": 1} if "tau" in values else {}
        found = exchange_memory(strategy_of(values), codecs_of(codec), regions)
        counts = (found.rank_rest, found.rank_peak, found.server_rest, found.server_peak)
        name = _named(strategy, codec, regions)
        figures += [
            support.Figure(f"{what}, {name}", count, "bytes per parameter")
            for what, count in zip(_HELD, counts, strict=True)
        ]
    return figures


def main() -> None:
    """Measure, and write the record and the tables."""
    parser = support.parser(__doc__)
    parser.add_argument("--tables", type=Path, metavar="FILE.md", help="the tables of the page")
    chosen = parser.parse_args()
    machine, figures = support.hardware(), []
    torch.set_num_threads(1)
    for width, _ in SIZES.values():
        figures.append(
            support.Figure(f"activations of a layer, {width}", layer_bytes(width), "bytes")
        )
    figures += exchange_figures()
    runs = [transport_ns() for _ in range(2 if chosen.quick else 5)]
    figures.append(support.median("ns per byte of the transport", runs, "ns"))
    rows = 512 if chosen.quick else 4096
    for name in CODECS_OF:
        support.say(name)
        up, down, rule = measured_bits(name, 1 if chosen.quick else 3)
        figures.append(support.Figure(f"bits of updates, {name}", up, "bits", baseline=rule))
        figures.append(support.Figure(f"bits of answers, {name}", down, "bits"))
        with torch.device("meta"):
            layout = Layout.of(nn.Linear(4096, rows, bias=False))
        exchanged(name, layout, ((0, layout.size),), 1)  # warms up
        found = exchanged(name, layout, ((0, layout.size),), 1 if chosen.quick else 9)
        for stage, seconds in found.seconds.items():
            each = [1e9 * value / layout.size for value in seconds]
            figures.append(support.median(f"ns of {stage}, {name}", each, "ns"))
    support.finish("planning.large_models", machine, figures, chosen.out)
    if chosen.tables is not None:
        record = json.loads(chosen.out.read_text("utf-8"))
        chosen.tables.write_text(tables(Measured.of(record["figures"])), "utf-8")


if __name__ == "__main__":
    main()
