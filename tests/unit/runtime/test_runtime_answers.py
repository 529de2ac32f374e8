"""A region's wait for its answer: it has no end of its own while the averager can be reached."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from geo_ray.base.errors import DeadlineExceededError, InvariantError, LinkDownError
from geo_ray.runtime.exchange.direct import Answers
from geo_ray.training.messages import ReplyMessage


def reply(seq: int) -> ReplyMessage:
    return ReplyMessage("eu", seq, 1, 1, torch.zeros(1))


def test_an_answer_that_takes_long_is_waited_for_while_there_is_a_connection() -> None:
    answers = Answers("eu", 1e6, lambda peer: peer == "us", unreachable_s=0.05)
    threading.Timer(1.5, answers.give, [reply(7)]).start()
    assert answers.wait(7, lambda: "us").seq == 7


def test_an_unreachable_region_is_not_waited_for_too_long() -> None:
    answers = Answers("eu", 1e6, lambda peer: False, unreachable_s=0.1)
    with pytest.raises(LinkDownError, match="'us' has been unreachable"):
        answers.wait(1, lambda: "us")


def test_an_averager_in_the_own_region_needs_no_connection() -> None:
    answers = Answers("eu", 1e6, lambda peer: False, unreachable_s=0.05)
    threading.Timer(0.8, answers.give, [reply(1)]).start()
    assert answers.wait(1, lambda: "eu").seq == 1


def test_an_averager_that_has_moved_is_asked_for_by_its_new_region() -> None:
    began_s = time.monotonic()
    answers = Answers("eu", 1e6, lambda peer: peer == "asia", unreachable_s=0.4)
    threading.Timer(1.5, answers.give, [reply(1)]).start()
    leader = lambda: "us" if time.monotonic() - began_s < 0.2 else "asia"  # noqa: E731
    assert answers.wait(1, leader).seq == 1


def test_a_limit_that_is_configured_holds() -> None:
    with pytest.raises(DeadlineExceededError, match=r"step_timeout_s = 0\.1 s"):
        Answers("eu", 0.1).wait(1, lambda: "us")


def test_refusals_and_the_end_are_reported_and_old_answers_dropped() -> None:
    answers = Answers("eu", 1e6)
    answers.give(reply(1))
    answers.fail(2, InvariantError("no"))
    with pytest.raises(InvariantError, match="no"):
        answers.wait(2, lambda: "us")
    answers.close()
    with pytest.raises(LinkDownError, match="closing"):
        answers.wait(1, lambda: "us")
