"""States of a cluster machine: its node, and the events that make it leave."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.cloud.autoscaler.state import InstanceState, ManagedInstance
from geo_ray.cloud.provider import Machine, MachineState, Market, Pool


def instance() -> ManagedInstance:
    pool = Pool("r-1", None, "small", Market.SPOT)
    machine = Machine("i-1", "as-1", pool, MachineState.RUNNING, 0.0)
    return ManagedInstance(machine, "the plan", 1.0, 0.0, 0.0, 0.0)


def test_its_node_joins_is_lost_and_joins_again() -> None:
    one = instance()
    assert one.state is InstanceState.BOOTING and not one.has_joined
    for event, state in (
        ("join", InstanceState.READY),
        ("disconnect", InstanceState.DISCONNECTED),
        ("join", InstanceState.READY),
    ):
        one.apply(event, 5.0)  # type: ignore[arg-type]
        assert one.state is one.node is state and one.has_joined and one.stays
    assert one.node_unix_s == 5.0


def test_one_that_is_kept_has_the_state_that_its_node_has_by_then() -> None:
    one = instance()
    one.leave("cheaper")
    assert one.state is InstanceState.LEAVING and one.leaves_for == "cheaper" and not one.stays
    one.apply("join", 9.0)
    assert one.state is InstanceState.LEAVING and one.is_ready
    one.keep()
    assert one.state is InstanceState.READY and one.termination is None


def test_a_drained_one_keeps_its_successor_and_cannot_be_kept() -> None:
    one = instance()
    one.leave("a notice")
    assert one.termination is not None
    one.termination.successor = "i-2"
    one.drain("a notice", 60.0, 3)
    assert one.state is InstanceState.DRAINING
    assert (one.termination.deadline_unix_s, one.termination.successor) == (60.0, "i-2")
    with pytest.raises(InvariantError, match="'keep booting' is not possible while draining"):
        one.keep()


def test_one_whose_node_computes_is_never_terminated_at_once() -> None:
    one = instance()
    one.apply("join")
    with pytest.raises(InvariantError):
        one.terminate("no node", 1.0)
    one.apply("disconnect")
    one.terminate("no node", 1.0)
    one.apply("end")
    assert one.state is InstanceState.TERMINATED
