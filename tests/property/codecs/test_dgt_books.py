"""Whatever the network does: a lossy block is taken in or sent again, never both, never neither."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.codecs.dgt import Dgt
from geo_ray.codecs.feedback import Encoder
from geo_ray.training.lossy_blocks import LossyReceiver, LossySender
from geo_ray.training.messages import UpdateMessage

NUM = 37


class Link:
    """One region and its page in the averager, with a network that a test drives."""

    def __init__(self, codec: Dgt) -> None:
        self.codec = codec
        self.encoder = Encoder(codec, "link")
        self.out, self.books = LossySender(codec), LossyReceiver(codec, NUM)
        self.produced_P, self.merged_P = torch.zeros(NUM), torch.zeros(NUM)
        self.seq, self.left = 0, 0
        self.flying: list[tuple[int, int, int, bytes]] = []
        self.queue: list[tuple[int, int, int, bytes]] = []

    def outgoing(
        self, x_P: torch.Tensor, cut: int, *, final: bool, samples: int = 1, ahead: int = 0
    ) -> None:
        """The whole exchange of one update.

        ``cut``: lossy blocks of the last that left in time. ``ahead``: those of this one that
        outrun its reliable part.
        """
        self.leave(cut)
        if self.queue:
            for part in self.out.unsent(self.seq, self.queue[0][1]):
                self.encoder.put_back(self.codec.decode(part))
            self.queue = []
        self.seq += 1
        self.produced_P += x_P
        update = UpdateMessage("here", 1, self.seq, 0, samples, x_P, final)
        if final:
            for part in self.out.take_all():
                self.encoder.put_back(self.codec.decode(part))
            update = replace(update, payload_P=self.encoder.in_full(x_P))
        else:
            coded = self.encoder.encode(x_P, self.seq).coded
            assert coded is not None
            self.out.sent(self.seq, coded)
            if coded.lossy is not None:
                pairs = zip(coded.lossy.ids_L.tolist(), coded.lossy.blocks_LK, strict=True)
                self.queue = [
                    (self.seq, rank, block, bytes(data.numpy()))
                    for rank, (block, data) in enumerate(pairs)
                ]
            update = replace(update, payload_P=torch.empty(0), coded=replace(coded, lossy=None))
            flying = len(self.flying)
            self.leave(ahead)
            for place in range(flying, len(self.flying)):
                self.arrive(place)
        whole = self.books.complete(update)
        again = self.books.complete(update)  # a repetition changes nothing
        assert again is update
        self.merged_P += whole.payload_P
        for part in self.out.settle(self.seq, self.books.report(self.seq)):
            self.encoder.put_back(self.codec.decode(part))

    def leave(self, count: int) -> None:
        self.flying += self.queue[:count]
        self.queue = self.queue[count:]

    def arrive(self, place: int) -> None:
        seq, rank, block, data = self.flying[place]
        self.books.on_blocks(1, seq, rank, [block], [data])

    @property
    def owed_P(self) -> torch.Tensor:
        residual_P = self.encoder.residual_P
        total_P = torch.zeros(NUM) if residual_P is None else residual_P.clone()
        copy = LossySender(self.codec)  # as whoever resumes has it
        copy.restore(*self.out.export())
        for part in copy.take_all():
            total_P += self.codec.decode(part)
        return total_P


options = st.fixed_dictionaries(
    {
        "block_bytes": st.sampled_from([4, 8, 20]),
        "reliable_fraction": st.sampled_from([0.1, 0.5, 0.9]),
        "loose_values": st.sampled_from(["fp32", "fp16", "int4"]),
        "order": st.sampled_from(["ranked", "random"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(options, st.data())
def test_taken_in_plus_owed_is_produced(chosen: dict[str, object], data: st.DataObject) -> None:
    link = Link(Dgt.model_validate(chosen))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 6))):
        sent = data.draw(st.integers(0, 12))
        # A weightless update has nothing in it: a refused gradient is one of zeros.
        samples = data.draw(st.sampled_from([1, 1, 1, 0]))
        x_P = torch.randint(-64, 64, (NUM,)).float() * (samples > 0)
        ahead = data.draw(st.sampled_from([0, 0, 2, 12]))
        link.outgoing(x_P, sent, final=False, samples=samples, ahead=ahead)
        link.leave(data.draw(st.integers(0, 12)))
        for _ in range(data.draw(st.integers(0, 20))):  # lost, reordered, repeated, very late
            if link.flying:
                link.arrive(data.draw(st.integers(0, len(link.flying) - 1)))
        # What lies in the averager's books is open in the sender's: it counts once.
        assert torch.allclose(link.merged_P + link.owed_P, link.produced_P, atol=1e-3)
    link.outgoing(torch.ones(NUM), data.draw(st.integers(0, 12)), final=True)
    for place in range(len(link.flying)):
        link.arrive(place)
    assert torch.allclose(link.merged_P, link.produced_P, atol=1e-3)


@pytest.mark.parametrize("late", ["merge", "put_back"])
def test_without_loss_a_lossless_share_is_all_there_one_update_later(late: str) -> None:
    link = Link(Dgt.model_validate({"block_bytes": 8, "reliable_fraction": 0.3, "late": late}))
    total_P = torch.zeros(NUM)
    for _ in range(5):
        x_P = torch.randint(-9, 9, (NUM,)).float()
        total_P += x_P
        link.outgoing(x_P, 99, final=False)
        link.leave(99)
        for place in range(len(link.flying)):
            link.arrive(place)
        link.flying = []
    link.outgoing(torch.zeros(NUM), 0, final=False)
    assert torch.equal(link.merged_P, total_P)
    assert link.books.counts.late > 0 and link.books.counts.double == 0


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_first_blocks_of_a_sender_may_outrun_its_first_update(attempt: int) -> None:
    codec = Dgt.model_validate({"block_bytes": 8, "reliable_fraction": 0.3})
    books, others = LossyReceiver(codec, NUM), 0
    if attempt > 1:  # one before it was here, and something of it still flies about
        books.complete(UpdateMessage("here", 1, 7, 0, 1, torch.zeros(NUM), False))
        others = books.on_blocks(1, 8, 0, [0], [bytes(8)])
    x_P = torch.arange(NUM, dtype=torch.float32)
    coded = Encoder(codec, "link").encode(x_P, 3).coded
    assert coded is not None and coded.lossy is not None
    ids, blocks = coded.lossy.ids_L.tolist(), [bytes(b.numpy()) for b in coded.lossy.blocks_LK]
    assert books.on_blocks(attempt, 4, 0, [0], [bytes(8)]) == 1  # of none that ever comes
    assert books.on_blocks(attempt, 3, 0, ids, blocks) == len(ids)
    empty_P, rest = torch.empty(0), replace(coded, lossy=None)
    whole = books.complete(UpdateMessage("here", attempt, 3, 0, 1, empty_P, False, coded=rest))
    assert torch.equal(whole.payload_P, x_P)
    assert others == attempt - 1 and books.counts.on_time == len(ids)
    assert books.counts.refused == books.counts.late == 0
