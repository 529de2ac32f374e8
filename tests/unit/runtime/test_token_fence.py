"""A process obeys only the run actor with the newest fencing token."""

from __future__ import annotations

import threading

import pytest

from geo_ray.base.errors import LeaseLostError
from geo_ray.runtime.spec import TokenFence


def test_an_earlier_token_is_refused_after_a_later_one() -> None:
    fence = TokenFence()
    for token in (0, 1, 1, 3):
        fence.check(token)
    with pytest.raises(LeaseLostError, match="taken over by holder 3"):
        fence.check(2)
    fence.check(3)


def test_a_waiting_call_is_refused_after_a_later_token() -> None:
    fence, found = TokenFence(), list[str]()
    fence.check(1)
    fence.wait(1, 0.01)  # nobody came

    def wait() -> None:
        try:
            fence.wait(1, 60.0)
        except LeaseLostError as error:
            found.append(error.message)

    waiting = threading.Thread(target=wait)
    waiting.start()
    fence.check(2)
    waiting.join(30.0)
    assert len(found) == 1 and "holder 2" in found[0]
