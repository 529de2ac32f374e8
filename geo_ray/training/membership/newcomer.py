"""What a region begins with that joins in the middle of a run: another region's state at a border.

The copy has the other one's parameters, moments of the optimizer, memory of the strategy, numbers
of steps and requests, and the newest answer. It has not what that region has still to say (debts of
codecs, `RegionTraits.unsent`), nor its books of rows: a newcomer reads its own data, from where it
was if it was there before.

Shape legend: S = parameters of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from geo_ray.errors import CheckpointCorruptError
from geo_ray.strategies.traits import Traits
from geo_ray.training.exchange.region_wire import REFERENCE
from geo_ray.training.server.ledger import Ledger
from geo_ray.training.server.region_carry import CARRIED

ShardState = tuple[dict[str, Tensor], dict[str, float]]
"""Tensors and numbers of one shard, as `Shard.export` gives them."""


def region_state(
    control: Mapping[str, object], tensors: Mapping[str, Tensor], rows: Mapping[str, object] | None
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """What a newcomer's `Server.restore` is given.

    Args:
        control: of the region whose copy it is, from its `HandOver`, as for the next.
        tensors: its wire's, and what its model carries.
        rows: the newcomer's own books, if it was there before, as its ledger's `export` gave them.
    """
    ledger = Ledger() if rows is None else Ledger.restore(dict(rows))
    for worker in list(ledger.in_flight):
        ledger.take_back(worker)
    own: dict[str, object] = {"ledger": ledger.export(), "noise": None, "times_s": None}
    kept = {k: v for k, v in tensors.items() if k == REFERENCE or k.startswith(CARRIED)}
    return {**control, **own}, kept


def rows_of(control: Mapping[str, object]) -> dict[str, object]:
    """The books of rows of a region by its part of a checkpoint, as `region_state` is given them.

    Raises:
        CheckpointCorruptError: there are none.
    """
    ledger = control.get("ledger")
    if not isinstance(ledger, Mapping):
        raise CheckpointCorruptError("a region's part has no books of rows")
    return dict(ledger)


def shard_state(state: ShardState, traits: Traits) -> ShardState:
    """What one of its shards is given, of the other region's shard of the same slice."""
    tensors, numbers = state
    unsent = {f"memory/{name}" for name in traits.region.unsent}
    return {k: v for k, v in tensors.items() if k not in unsent}, dict(numbers)
