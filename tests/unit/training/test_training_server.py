"""The parameter server of a region, driven one event at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import Span, StepReport
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.sma import Sma
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.effects import Assignment, Effect, SendUpdate, Snapshot, StepDone
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.optimizers import Sgd
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard

NUM_PARAMS = 5


def make(strategy, *, workers=2, steps=4, mode="sync", alone=False, **plan):
    shard = Shard(torch.zeros(NUM_PARAMS), Sgd(lr=1.0), strategy, alone=alone)
    todo = ServerPlan("eu", workers, batch_size=8, steps=steps, mode=mode, **plan)
    return Server.over([shard], NUM_PARAMS, todo, WirePlan()), shard


def answers(effects: list[Effect]) -> dict[int, Assignment]:
    return {e.worker: e for e in effects if isinstance(e, Assignment)}


def sends(effects: list[Effect]) -> list[SendUpdate]:
    return [e for e in effects if isinstance(e, SendUpdate)]


def push(server, shard, worker, value=1.0, refused=None):
    span = server.ledger.in_flight[worker]
    shard.put(worker, torch.full((NUM_PARAMS,), value))
    effects = server.push(worker, StepReport(span, None if refused else 0.5, 0.01, refused))
    server.ledger.check()
    return effects


def reply_to(send: SendUpdate, payload: torch.Tensor | None = None, **more) -> ReplyMessage:
    update = send.update
    return ReplyMessage(
        update.region,
        update.seq,
        update.base_version + 1,
        update.num_samples,
        update.payload_P.clone() if payload is None else payload,
        update.final,
        **more,
    )


def test_nobody_gets_rows_before_all_ranks_are_there():
    server, _ = make(Sma(interval=2))
    assert server.join(1) == []
    given = answers(server.join(0))
    assert given[0].span == Span(0, 8)
    assert given[1].span == Span(8, 8)


def test_a_step_needs_every_worker_and_is_their_mean():
    server, shard = make(Sma(interval=2))
    server.join(0), server.join(1)
    assert push(server, shard, 0, value=1.0) == []
    effects = push(server, shard, 1, value=3.0)
    done = next(e for e in effects if isinstance(e, StepDone))
    assert (done.step, done.samples) == (1, 16)
    assert torch.equal(shard.params_S, torch.full((NUM_PARAMS,), -2.0))
    assert answers(effects)[1].span == Span(24, 8)


def test_a_blocking_strategy_holds_the_workers_until_the_answer():
    server, shard = make(Sma(interval=1), workers=1)
    server.join(0)
    effects = push(server, shard, 0)
    (send,) = sends(effects)
    assert send.blocking and answers(effects) == {}
    assert send.update.num_samples == 8
    effects = server.on_reply(reply_to(send, torch.full((NUM_PARAMS,), 7.0)))
    assert answers(effects)[0].version == 1
    assert torch.equal(shard.params_S, torch.full((NUM_PARAMS,), 7.0))


def test_when_busy_stands_still_only_while_the_link_is_busy():
    server, shard = make(AsgdGa(interval=1, wait="when_busy"), workers=1)
    server.join(0)
    first = push(server, shard, 0)
    assert sends(first) and answers(first)  # goes on while the message travels
    second = push(server, shard, 0)
    assert not sends(second) and not answers(second)
    effects = server.on_reply(reply_to(sends(first)[0], torch.zeros(NUM_PARAMS)))
    assert sends(effects)[0].update.seq == 2 and answers(effects)


def test_never_waits_and_lets_the_sum_grow():
    server, shard = make(AsgdGa(interval=1, wait="never"), workers=1, steps=10)
    server.join(0)
    first = sends(push(server, shard, 0))
    for _ in range(3):
        assert not sends(push(server, shard, 0))
    server.on_reply(reply_to(first[0], torch.zeros(NUM_PARAMS)))
    (send,) = sends(push(server, shard, 0))
    assert torch.equal(send.update.payload_P, torch.full((NUM_PARAMS,), 4.0))
    assert send.update.num_samples == 32


def test_the_end_is_a_final_exchange_then_an_evaluation():
    server, shard = make(AsgdGa(interval=100), workers=1, steps=2)
    server.join(0)
    push(server, shard, 0)
    effects = push(server, shard, 0)
    (send,) = sends(effects)
    assert send.update.final and answers(effects) == {}
    last = answers(server.on_reply(reply_to(send, torch.zeros(NUM_PARAMS))))[0]
    assert last.done and last.evaluate and last.span is None
    assert server.phase == "done"


def test_a_replacement_gets_the_rows_of_the_one_that_was_lost():
    server, shard = make(Sma(interval=4))
    server.join(0), server.join(1)
    push(server, shard, 0)
    server.leave(1)
    effects = server.join(1)
    assert answers(effects)[1].span == Span(8, 8)
    effects = push(server, shard, 1)
    assert {0, 1} == set(answers(effects))
    assert server.ledger.applied == 16


def test_a_worker_lost_after_its_push_does_not_stop_the_step():
    server, shard = make(Sma(interval=4))
    server.join(0), server.join(1)
    push(server, shard, 1)
    server.leave(1)
    assert answers(push(server, shard, 0)) == {}  # nobody goes on before the rank is filled
    assert server.version == 1
    assert set(answers(server.join(1))) == {0, 1}


def test_a_refused_gradient_changes_nothing_and_is_booked():
    server, shard = make(Sma(interval=4), workers=1, max_refused=2)
    server.join(0)
    effects = push(server, shard, 0, value=float("nan"), refused="loss_not_finite")
    assert torch.equal(shard.params_S, torch.zeros(NUM_PARAMS))
    assert next(e for e in effects if isinstance(e, StepDone)).refused == ("loss_not_finite",)
    assert not server.exhausted
    push(server, shard, 0, value=float("inf"), refused="gradient_not_finite")
    assert server.exhausted
    assert dict(server.ledger.discarded) == {"loss_not_finite": 8, "gradient_not_finite": 8}


def test_one_refused_worker_leaves_the_others_gradient():
    server, shard = make(Sma(interval=4))
    server.join(0), server.join(1)
    push(server, shard, 0, value=float("nan"), refused="loss_not_finite")
    push(server, shard, 1, value=2.0)
    assert torch.equal(shard.params_S, torch.full((NUM_PARAMS,), -2.0))


def test_async_applies_each_push_alone():
    server, shard = make(Sma(interval=100), mode="async", steps=2)
    first = answers(server.join(0))
    assert first[0].span == Span(0, 8)
    server.join(1)
    effects = push(server, shard, 1, value=1.0)
    assert answers(effects)[1].span == Span(16, 8)
    assert torch.equal(shard.params_S, torch.full((NUM_PARAMS,), -1.0))


def test_async_workers_that_push_late_exit_and_their_rows_are_recorded():
    server, shard = make(Sma(interval=100), mode="async", steps=1, alone=True)
    server.join(0), server.join(1)
    push(server, shard, 0)
    push(server, shard, 0)  # 2 pushes are all: 1 step x 2 workers
    assert server.phase == "done"
    late = push(server, shard, 1)
    assert answers(late)[1].done
    assert server.ledger.discarded["after_end"] == 8


def test_a_stop_in_an_answer_ends_after_the_step_in_the_making():
    server, shard = make(AsgdGa(interval=1, wait="never"), workers=1, steps=50)
    server.join(0)
    (send,) = sends(push(server, shard, 0))
    server.on_reply(reply_to(send, torch.zeros(NUM_PARAMS), stop=True))
    (final,) = sends(push(server, shard, 0))  # the next word of every region is its last one
    assert server.version == 2 and final.update.final


def test_a_checkpoint_is_of_its_moment_and_has_the_open_request():
    server, shard = make(Sma(interval=1), workers=1)
    server.join(0)
    (send,) = sends(push(server, shard, 0))
    sent = server.wire.encode(send.update)
    before_P = shard.params_S.clone()
    (snapshot,) = server.snapshot(9, halt=False)
    assert snapshot.id == 9 and snapshot.control["version"] == 1
    assert server.snapshot(9, halt=False) == []  # the answer says it, too
    server.on_reply(server.wire.decode(reply_to(send, torch.full((NUM_PARAMS,), 3.0))))
    push(server, shard, 0)
    tensors, counters = shard.take_snapshot(9)
    assert torch.equal(tensors["params"], before_P)
    again, shard_again = make(Sma(interval=1), workers=1)
    again.restore(snapshot.control, snapshot.tensors)
    shard_again.restore(tensors, counters)
    (repeated,) = again.resume()
    assert again.phase == "waiting" and repeated.blocking
    assert again.wire.encode(repeated.update) is repeated.update  # as it was coded
    assert torch.equal(repeated.update.payload_P, sent.payload_P)
    assert (repeated.update.attempt, repeated.update.seq) == (sent.attempt, sent.seq)
    assert answers(again.join(0)) == {}
    assert answers(again.on_reply(reply_to(repeated, torch.zeros(NUM_PARAMS))))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("names_ends", [True, False])
def test_a_final_update_is_repeated_and_then_there_is_more_to_do(steps: int, names_ends: bool):
    """Checkpoints from before ends were named have it repeated as an ordinary update."""
    server, shard = make(AsgdGa(interval=100), workers=1, steps=1, goal="steps 1")
    server.join(0)
    (final,) = sends(push(server, shard, 0))
    assert final.update.final and server.phase == "finishing"
    (snapshot,) = server.snapshot(1, halt=False)
    control = {k: v for k, v in snapshot.control.items() if names_ends or k != "ends"}
    again, copy = make(AsgdGa(interval=100), workers=1, steps=steps, goal=f"steps {steps}")
    copy.restore(*shard.take_snapshot(1))
    again.restore(control, snapshot.tensors)
    (repeated,) = again.resume()
    assert repeated.update.final == (names_ends or steps == 1)
    assert again.phase == ("finishing" if repeated.update.final else "waiting")
    if repeated.update.final:
        again.on_reply(replace(reply_to(repeated), final=True))
        assert again.phase == ("done" if steps == 1 else "training")


def test_a_halted_region_lets_its_workers_exit():
    server, shard = make(Sma(interval=1), workers=1)
    server.join(0)
    (send,) = sends(push(server, shard, 0))
    effects = server.snapshot(1, halt=True)
    assert answers(effects)[0].done and not answers(effects)[0].evaluate
    assert server.on_reply(reply_to(send)) == []  # it is in nobody's checkpoint


@pytest.mark.parametrize("comes_back", ["before", "after"])
def test_a_region_that_stands_still_copies_the_same_again(comes_back: str):
    """The checkpoint that it halted for may come to nothing."""
    server, shard = make(Sma(interval=2), workers=2)
    server.join(0), server.join(1)
    push(server, shard, 0), push(server, shard, 1)
    push(server, shard, 0)
    (first,) = [e for e in server.snapshot(1, halt=True) if isinstance(e, Snapshot)]
    tensors, counters = shard.take_snapshot(1)
    if comes_back == "before":  # with rows that are too late for the halt
        push(server, shard, 1)
    (second,) = server.snapshot(2, halt=True)
    assert server.phase == "halted" and second.id == 2
    assert second.control == first.control and second.control["phase"] == "training"
    tensors_again, counters_again = shard.take_snapshot(2)
    assert counters_again == counters and tensors_again.keys() == tensors.keys()
    assert all(torch.equal(tensors_again[name], value) for name, value in tensors.items())
    again, shard_again = make(Sma(interval=2), workers=2)
    again.restore(second.control, second.tensors)
    shard_again.restore(tensors_again, counters_again)
    rows = [a.span for w in (0, 1) for a in answers(again.join(w)).values()]
    assert sorted((s.start, s.stop) for s in rows) == [(16, 24), (24, 32)]
    assert server.snapshot(2, halt=True) == []


def test_a_region_that_stands_still_for_an_answer_copies_its_request_again():
    server, shard = make(Sma(interval=1), workers=1)
    server.join(0)
    (send,) = sends(push(server, shard, 0))
    first, *_ = server.snapshot(1, halt=True)  # before the request was coded
    sent = server.wire.encode(send.update)
    (second,) = server.snapshot(2, halt=True)
    assert second.control["phase"] == first.control["phase"] == "waiting"
    again, _ = make(Sma(interval=1), workers=1)
    again.restore(second.control, second.tensors)
    (repeated,) = again.resume()
    assert again.wire.encode(repeated.update) is repeated.update  # as it was coded
    assert torch.equal(repeated.update.payload_P, sent.payload_P)


def test_a_region_at_its_end_is_saved_and_stays_there_when_the_run_is_to_halt():
    server, shard = make(Sma(interval=1), workers=1, steps=1, alone=True)
    server.join(0)
    push(server, shard, 0)
    assert server.phase == "done"
    (snapshot,) = server.snapshot(3, halt=True)
    assert snapshot.control["phase"] == "done" and server.phase == "done"


def test_restored_servers_give_out_the_rows_that_were_in_flight():
    server, shard = make(Sma(interval=3), alone=True)
    server.join(0), server.join(1)
    push(server, shard, 0), push(server, shard, 1)
    push(server, shard, 0)
    (snapshot,) = [e for e in server.snapshot(1, halt=False) if isinstance(e, Snapshot)]
    again, shard_again = make(Sma(interval=3), alone=True)
    again.restore(snapshot.control)
    shard_again.restore(*shard.take_snapshot(1))
    again.join(0)
    given = answers(again.join(1))
    assert (given[0].span, given[1].span) == (Span(16, 8), Span(24, 8))
    assert given[0].version == 1


def test_evaluations_fall_on_multiples():
    server, shard = make(Sma(interval=100), workers=1, steps=5, eval_every=2)
    server.join(0)
    seen = [answers(push(server, shard, 0))[0].evaluate for _ in range(4)]
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("told", [False, True])
def test_an_evaluation_that_was_lost_with_its_worker_is_made_again(told):
    server, shard = make(Sma(interval=100), steps=9, eval_every=2)
    server.join(0), server.join(1)
    for _ in range(2):
        push(server, shard, 0)
        given = answers(push(server, shard, 1))
    assert given[0].evaluate
    if told:
        server.work.evals.reported()
    server.leave(0)
    again = answers(server.join(0))[0]
    assert (again.evaluate, again.version) == (not told, 2)
    server.work.evals.reported()
    server.leave(0)
    assert not answers(server.join(0))[0].evaluate


@pytest.mark.parametrize("rank", [-1, 2])
def test_unknown_ranks_are_refused(rank):
    server, _ = make(Sma())
    with pytest.raises(InvariantError, match="no worker"):
        server.join(rank)


def test_rows_of_a_rank_that_is_no_more_go_to_the_others():
    server, shard = make(Sma(interval=100), workers=3)
    for rank in range(3):
        server.join(rank)
    again, shard = make(Sma(interval=100), workers=2)
    again.restore(server.export())
    again.join(0)
    assert [answers(again.join(1))[rank].span.start for rank in (0, 1)] == [0, 8]
    again.ledger.check()
    push(again, shard, 0)
    assert again.ledger.returned == [Span(16, 8)]
    assert answers(push(again, shard, 1))[0].span == Span(16, 8)


def test_a_stop_with_a_round_ends_with_the_round():
    """Async: a gradient that is being computed is late, or regions would differ by a step."""
    server, shard = make(Sma(interval=1), mode="async", steps=9)
    server.join(0), server.join(1)
    (send,) = sends(push(server, shard, 0))  # worker 1 is still computing
    effects = server.on_reply(reply_to(send, stop=True))
    assert server.phase == "done" and not sends(effects)
    assert answers(push(server, shard, 1))[1].done
    assert server.ledger.discarded["after_end"] == 8


def test_a_final_update_that_was_taken_for_an_ordinary_one_is_sent_again():
    server, shard = make(AsgdGa(interval=100), workers=1, steps=1)
    server.join(0)
    (send,) = sends(push(server, shard, 0))
    (again,) = sends(server.on_reply(ReplyMessage("eu", 1, 1, 8, torch.zeros(NUM_PARAMS))))
    assert again.update.final and again.update.seq == send.update.seq + 1
    assert torch.equal(again.update.payload_P, torch.zeros(NUM_PARAMS))
    server.on_reply(reply_to(again))
    assert server.phase == "done"


def test_a_restored_region_sends_first_if_it_had_to():
    strategy = AsgdGa(interval=1, wait="when_busy")
    server, shard = make(strategy, workers=1, steps=9)
    server.join(0)
    (first,) = sends(push(server, shard, 0))
    assert sends(push(server, shard, 0)) == [] and server.phase == "must_send"
    (snapshot,) = server.snapshot(3, halt=False)
    again, shard_again = make(strategy, workers=1, steps=9)
    again.restore(snapshot.control, snapshot.tensors)
    shard_again.restore(*shard.take_snapshot(3))
    assert [effect.update.seq for effect in again.resume()] == [1]
    assert again.join(0) == [] and again.phase == "must_send"
    reply = reply_to(first, torch.zeros(NUM_PARAMS))
    (send,), (expected,) = (sends(one.on_reply(reply)) for one in (again, server))
    assert (send.update.seq, send.update.num_samples) == (2, 8)
    assert torch.equal(send.update.payload_P, expected.update.payload_P)


# ------------------------------------------------------------------ dropped updates


def skipped(server, update: UpdateMessage) -> list[Effect]:
    """The averager has answered an update without taking it in."""
    nothing_P = torch.zeros(NUM_PARAMS)
    reply = ReplyMessage("eu", update.seq, 0, 0, nothing_P, dropped=True)
    return server.on_reply(server.wire.decode(reply))


def model_buffers(server, effects: list[Effect]):
    """What a shell does with the one message of these effects."""
    (send,) = sends(effects)
    return server.wire.encode(send.update)


def test_a_dropped_update_sets_a_region_that_waits_free():
    server, shard = make(Asgd(combine="sum"), workers=1)
    server.join(0)
    update = model_buffers(server, push(server, shard, 0))
    assert server.phase == "waiting"
    effects = skipped(server, update)
    assert answers(effects)[0].span == Span(8, 8) and not shard.state.link_busy
    again = model_buffers(server, push(server, shard, 0))
    assert (again.seq, again.num_samples) == (2, 16)
    assert torch.equal(again.payload_P, torch.full((NUM_PARAMS,), 2.0))


def test_a_region_that_had_to_send_does_so_after_a_drop():
    server, shard = make(AsgdGa(interval=1, wait="when_busy", combine="sum"), workers=1)
    server.join(0)
    first = model_buffers(server, push(server, shard, 0))
    assert sends(push(server, shard, 0, value=3.0)) == [] and server.phase == "must_send"
    second = model_buffers(server, skipped(server, first))
    assert torch.equal(second.payload_P, torch.full((NUM_PARAMS,), 4.0))


def test_a_final_update_that_was_dropped_is_sent_again():
    server, shard = make(AsgdGa(interval=100, combine="sum"), workers=1, steps=1)
    server.join(0)
    last = model_buffers(server, push(server, shard, 0))
    again = model_buffers(server, skipped(server, last))
    assert last.final and again.final and torch.equal(last.payload_P, again.payload_P)
    server.on_reply(ReplyMessage("eu", again.seq, 1, 8, torch.zeros(NUM_PARAMS), final=True))
    assert server.phase == "done"
