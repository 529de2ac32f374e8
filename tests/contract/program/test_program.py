"""What a program does is the same in all ways; on Ray: tests/integration/program."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from geo_ray.base.errors import NodeFailedError
from geo_ray.program.graph import ProgramNode
from geo_ray.program.run import On, run_program
from geo_ray.ray_cluster.process_supervisor import descendants
from tests.support import program_support as toys


@pytest.fixture(params=["threads", "virtual", "processes"])
def on(request: pytest.FixtureRequest) -> On:
    way: On = request.param
    return way


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = descendants(os.getpid())
    yield
    assert descendants(os.getpid()) <= before


def test_calls_of_every_kind(on: On) -> None:
    result = run_program(toys.battery(), on)
    assert result.values == {"caller": toys.BATTERY, "flaky": 2}
    assert result.restarts == {"flaky": 1}
    assert result.on == on
    # Bytes are those of the values, so they are the same in all ways.
    found = {(t.edge.source, t.edge.target): t for t in result.traffic}
    assert found["caller", "counter"].calls == 3
    assert found["caller", "counter"].request_bytes == 3 * len(b"\x92\x90\x80")
    assert found["caller", "counter"].answer_bytes == 3
    assert found["flaky", "ticks"].calls == 2
    assert found["caller", "far"].edge.crosses
    assert not found["caller", "near"].edge.crosses


def test_a_node_that_fails_too_often_ends_the_program(on: On) -> None:
    with pytest.raises(NodeFailedError) as caught:
        run_program(toys.flaky(failures=3, restarts=2), on)
    text = str(caught.value)
    assert "node 'flaky' failed in run: RuntimeError('run 3 of a flaky node')" in text
    assert "restarts.most = 2 in 60 s" in text
    assert 'in run\n    raise RuntimeError(f"run {count} of a flaky node")' in text


def test_a_node_that_cannot_be_made(on: On) -> None:
    program = toys.alone(ProgramNode("unmade", toys.Unmade))
    with pytest.raises(
        NodeFailedError, match=r"'unmade' failed while it was created: .*no such luck"
    ):
        run_program(program, on)


def test_the_example(on: On) -> None:
    result = run_program(toys.example(), on)
    assert result.values == {"means": toys.MEANS}
    assert [(t.calls, t.request_bytes, t.answer_bytes) for t in result.traffic] == [
        (8, 32, 128)
    ] * 2


@pytest.mark.parametrize("on", ["threads", "virtual"])
def test_no_thread_is_left(on: On) -> None:
    before = set(threading.enumerate())
    run_program(
        toys.alone(ProgramNode("one", toys.Returns, (1,)), ProgramNode("idle", toys.Echo)), on
    )
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive(), thread
