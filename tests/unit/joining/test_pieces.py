"""Exchanges in pieces: the bits of whole vectors, without the memory of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from geo_ray.joining.layout import Layout, Ranges, positions, taken, within
from geo_ray.joining.numbering import ReceivedCounts, UnconfirmedMessages
from geo_ray.joining.pieces import Arriving, divided, piece_ranges, size_of
from geo_ray.joining.protocol import Hello, payload_of, rank_name
from geo_ray.joining.rank import JoinedModel, RankExchange, SliceWire
from geo_ray.joining.replication import needs_receipt
from geo_ray.joining.service import JoinService, Stage
from geo_ray.joining.vector import ParameterVector
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.wire_format import as_tensor, read_update, update_meta
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import Message
from tests.support.join_support import terms

INTERVAL = 2


class LargestNew(TorchDispatchMode):
    """Elements of the largest tensor that was made, views of ``known`` storages aside."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {each.untyped_storage().data_ptr() for each in known}
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self.elements = max(self.elements, storage.nbytes() // 4)
        return found


def network() -> nn.Module:
    """Layers of 300,000 parameters, of which one is frozen and one is not contiguous."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(300, 400), nn.Linear(400, 400), nn.Linear(400, 50), nn.Conv2d(4, 8, 3)
    )
    layers[2].requires_grad_(False)
    conv = layers[3]
    conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
    return layers


def exchange_of(model: nn.Module, cuts: tuple[Ranges, ...], *, in_pieces: bool) -> RankExchange:
    """Return the exchange of the only rank of a region, whose model has these slices."""
    strategy = {"kind": "diloco", "interval": INTERVAL, "weights": "uniform"}
    run = terms(["here"], 8, strategy=strategy)
    layout = Layout.of(model)
    vector = ParameterVector(model, layout)
    joined = JoinedModel(
        run.strategy, vector, run.bounds_in(vector.share, layout.size), in_pieces=in_pieces
    )
    joined.start()
    slices = [
        SliceWire(
            index,
            ranges,
            positions(ranges, vector.share),
            RegionWire(run.wire_plan(layout, ranges), "here", sum(b - a for a, b in ranges)),
        )
        for index, ranges in enumerate(cuts)
    ]
    return RankExchange(run.server_plan("here", 1), joined, slices=slices)


def assembled(messages: Iterable[Message]) -> Tensor:
    """Return the payload of an update, as the receiver of its messages has it."""
    header, *pieces = messages
    meta = {k: v for k, v in header.meta.items() if k not in ("slice", "size")}
    size = size_of(header)
    if size is None:
        return read_update(meta, header.payload).payload_P.clone()
    arriving, payload_Q = Arriving(size), torch.full((size,), torch.nan)
    for each in pieces:
        assert not arriving.is_complete
        start, values = arriving.take(each)
        payload_Q[start : start + values.numel()] = values
    assert arriving.is_complete
    return payload_Q


def train(exchange: RankExchange, model: nn.Module) -> UpdateMessage:
    """Make the steps until an exchange is due; return the update."""
    sent = []
    for step in range(INTERVAL):
        with torch.no_grad():
            for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
                change = torch.linspace(0, 1 + step, param.numel()).view(param.shape)
                param.add_(change, alpha=number + 1)
        sent = exchange.step(1, 0.1)
    (send,) = sent
    return send.update


class Copies:
    """The averager's side: payloads of all slices, of which the answers are a half."""

    def __init__(self) -> None:
        self.payloads: list[Tensor] = []

    def receive(self, messages: Iterator[Message]) -> None:
        self.payloads.append(assembled(messages))

    def answer(self, number: int, start: int, stop: int) -> Tensor:
        return self.payloads[number][start:stop] * 0.5


class Discarded(Copies):
    """Answers every update with ones, and keeps nothing."""

    def receive(self, messages: Iterator[Message]) -> None:
        for _ in messages:
            pass

    def answer(self, number: int, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start)


def exchange_with(exchange: RankExchange, update: UpdateMessage, server: Copies) -> None:
    """Send an update and merge its answer, as the thread of a rank does."""
    sizes = []
    for each, part in zip(exchange.slices, exchange.encoded(update), strict=True):
        values = partial(exchange.values, each, part.payload_P)
        server.receive(divided({**update_meta(part), "slice": each.index}, part, values))
        sizes.append(part.payload_P.numel())
    exchange.forget_sent()
    replies = []
    for number, (each, size) in enumerate(zip(exchange.slices, sizes, strict=True)):
        if exchange.model.in_pieces:
            for start, stop in piece_ranges(size):
                exchange.merge_piece(each, start, server.answer(number, start, stop))
            answer_Q = torch.empty(size, device="meta")
        else:
            answer_Q = server.answer(number, 0, size)
        replies.append(ReplyMessage("here", update.seq, 1, 1, answer_Q))
    exchange.on_replies(replies, 0.0)
    assert exchange.advance() == []


def test_pieces_have_the_bits_of_whole_vectors() -> None:
    size = Layout.of(network()).size
    cuts = (((0, 100_000), (200_000, size)), ((100_000, 200_000),))
    models = network(), network()
    exchanges = [
        exchange_of(each, cuts, in_pieces=in_pieces)
        for each, in_pieces in zip(models, (False, True), strict=True)
    ]
    for _ in range(2):
        servers = Copies(), Copies()
        for exchange, model, server in zip(exchanges, models, servers, strict=True):
            exchange_with(exchange, train(exchange, model), server)
        payloads = zip(servers[0].payloads, servers[1].payloads, strict=True)
        assert all(torch.equal(a, b) for a, b in payloads)
        assert all(
            torch.equal(a, b)
            for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
        )
        anchors = [exchange.model.state.memory["anchor"] for exchange in exchanges]
        assert torch.equal(*anchors)
        vector_P = [p.reshape(-1) for p in models[1].parameters() if p.requires_grad]
        assert torch.equal(anchors[1], torch.cat(vector_P))


def test_an_exchange_makes_no_tensor_larger_than_a_piece() -> None:
    """Neither for the change nor for the answer; plain exchanges make vectors of the model."""
    model = network()
    size = Layout.of(model).size
    largest = {}
    for in_pieces in (False, True):
        exchange = exchange_of(model, (((0, size),),), in_pieces=in_pieces)
        exchange_with(exchange, train(exchange, model), Discarded())  # makes the anchor
        update = train(exchange, model)
        known = [*model.parameters(), exchange.model.state.memory["anchor"]]
        with LargestNew(known) as found:
            exchange_with(exchange, update, Discarded())
        largest[in_pieces] = found.elements
    assert largest[False] >= size
    assert largest[True] <= 1 << 16


def test_the_server_holds_no_model_while_the_initial_one_passes() -> None:
    layout = Layout.of(network())
    service = JoinService(terms(["eu", "us"], 8, strategy={"kind": "diloco"}), lambda: 0.0)
    for name in ("eu", "us"):
        hello = Hello(name, 0, 1, 1, layout, ((0, layout.size),), None, ())
        welcomes = service.on_message(rank_name(name, 0), hello.message())
    assert [each.message.kind for each in welcomes] == ["welcome", "welcome"]
    params_P, passed_P = torch.arange(float(layout.size)), torch.zeros(layout.size)
    with LargestNew([params_P, passed_P]) as found:
        for start, stop in piece_ranges(layout.size):
            assert service.stage is Stage.STARTING
            meta: Meta = {"slice": 0, "start": start}
            payload = payload_of(params_P[start:stop])
            message = Message("state", meta, payload, "transfer")
            (passed,) = service.on_message(rank_name("eu", 0), message)
            assert passed.peer == rank_name("us", 0) and passed.message.meta == meta
            passed_P[start:stop] = as_tensor(memoryview(passed.message.payload))
    assert service.stage is Stage.TRAINING and torch.equal(passed_P, params_P)
    assert 0 < found.elements <= 1 << 16


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=5),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_within_places(gaps: list[tuple[int, int]], start: int, stop: int) -> None:
    """Elements of the places, as of the list of all of them."""
    places, at = [], 0
    for gap, length in gaps:
        places.append((at + gap, at + gap + length))
        at += gap + length
    vector = torch.arange(float(at))
    assert torch.equal(
        taken(vector, within(tuple(places), start, stop)), taken(vector, tuple(places))[start:stop]
    )


@given(sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=4))
def test_a_rank_keeps_few_pieces_that_have_arrived_and_none_of_a_whole_payload(
    sizes: list[int],
) -> None:
    sent, received = UnconfirmedMessages(), ReceivedCounts()
    for seq, size in enumerate(sizes):
        update = UpdateMessage("here", 1, seq, 0, 1, torch.empty(1).expand(size))
        for message in divided({"slice": 0}, update, lambda start, stop: torch.empty(stop - start)):
            numbered = sent.add(message)
            assert received.take(numbered) is not None
            if needs_receipt(numbered):
                sent.confirm(received.counts)
            assert len(sent.unconfirmed) < 8
        assert not sent.unconfirmed
