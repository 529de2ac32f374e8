"""What the regions' models carry beside their parameters, in the averager: the mean over regions.

The averager keeps the newest values of every region and answers with their mean by rows. In a round
those are the round's; for other strategies they are as new as they can be. A region whose last
update has no rows behind it keeps the weight of the one before.

Shape legend: E = bytes that regions exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from geo_ray.errors import InvariantError, NonFiniteError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.compute.carry_layout import CarryLayout

PREFIX = "carried/"
"""Of tensors in the averager's part of a checkpoint."""


@dataclass(slots=True)
class AveragerCarry:
    """See the module's docstring.

    Attributes:
        layout: of the vectors; an empty one carries nothing.
    """

    layout: CarryLayout = field(default_factory=lambda: CarryLayout(()))
    _newest: dict[str, Tensor] = field(default_factory=dict)
    _rows: dict[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """E: what comes with every update; 0: nothing does."""
        return self.layout.exchanged_bytes

    def check(self, update: Update) -> None:
        """Refuse what cannot be taken in.

        Raises:
            InvariantError: wrong size.
            NonFiniteError: it has NaN or infinity.
        """
        what = f"update {update.seq} of region '{update.region}'"
        if update.carried_E.shape != (self.size_bytes,):
            raise InvariantError(
                f"{what} has {update.carried_E.numel()} carried bytes, not {self.size_bytes}"
            )
        if self.size_bytes and not self.layout.is_finite(update.carried_E):
            raise NonFiniteError(f"what {what} carries is not finite; refused")

    def take(self, update: Update) -> None:
        """Take in what came with an update."""
        if not self.size_bytes:
            return
        self._newest[update.region] = update.carried_E.clone()
        if update.num_samples:
            self._rows[update.region] = float(update.num_samples)

    def join(self, region: str, giver: str) -> None:
        """A region begins as a copy of another one."""
        if giver in self._newest:
            self._newest[region] = self._newest[giver]
        if giver in self._rows:
            self._rows[region] = self._rows[giver]

    def leave(self, region: str) -> None:
        """Go on without a region."""
        self._newest.pop(region, None)
        self._rows.pop(region, None)

    def beside(self, replies: Sequence[Reply]) -> list[Reply]:
        """The answers with the mean."""
        if not self.size_bytes or not self._newest or not replies:
            return list(replies)
        names = sorted(self._newest)
        least = min(self._rows.values(), default=1.0)
        weights = [self._rows.get(name, least) for name in names]
        mean_E = self.layout.combine([self._newest[name] for name in names], weights)
        shares = {n: w / sum(weights) for n, w in zip(names, weights, strict=True)}
        return [replace(r, carried_E=mean_E, carried_share=shares.get(r.to, 0.0)) for r in replies]

    def export(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Tensors and plain values for a checkpoint; the tensors never change."""
        return {PREFIX + name: value for name, value in self._newest.items()}, dict(self._rows)

    def restore(self, tensors: Mapping[str, Tensor], rows: object) -> None:
        """Become what `export` saved."""
        self._newest = {
            name.removeprefix(PREFIX): value.clone()
            for name, value in tensors.items()
            if name.startswith(PREFIX)
        }
        known = rows if isinstance(rows, Mapping) else {}
        self._rows = {str(name): float(value) for name, value in known.items()}
