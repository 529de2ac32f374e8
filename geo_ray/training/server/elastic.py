"""Whether a region goes on while workers are missing, and what a step is meanwhile.

- Without a section: a step waits for every worker, or for its replacement.
- ``batch: fixed``: a step stays what it was, in rows and in shares. Whoever is there computes one
  share after the other, so the parameters are those of a run from which nobody was ever missing, to
  the bit; a step takes longer. A worker that computes a second share of a step costs the parameter
  server a copy of the first one's gradient.
- ``batch: follows``: a step has the rows of the workers that are there when it begins. It takes as
  long as before, its gradient is noisier, and as many steps are fewer rows (`train.count: together`
  trains until the rows are as many). ``rate`` says what becomes of the optimizer's learning rate:
  ``same``, or ``linear``: times the rows of the step, over those of all workers.

Either way every row of a region's stream is applied once, whoever computes it.

Source: that results need not depend on who computes is EasyScale's idea (Li et al., SC 2023); the
linear rule is that of Goyal et al., "Accurate, Large Minibatch SGD" (2017). Both reconstructed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.strategies.traits import Traits

_INNER_RATE: Final = "optimizer.lr"


class ElasticConfig(StrictModel):
    """Go on without workers that are lost or taken away, until they are replaced."""

    min_workers: int = Field(
        1, ge=1, description="with fewer a region stands still; one of fewer workers needs all"
    )
    batch: Literal["fixed", "follows"] = Field(
        "fixed", description="those that are there compute everybody's rows, or only their own"
    )
    rate: Literal["same", "linear"] = Field(
        "same", description="of the optimizer, in steps of fewer rows: linear goes by the rows"
    )

    def least(self, ranks: int) -> int:
        """Workers that a region of ``ranks`` needs."""
        return min(self.min_workers, ranks)

    def check(
        self, kind: str, traits: Traits, workers: Mapping[str, int], *, mode: str, stragglers: bool
    ) -> None:
        """Refuse what does not go together.

        Args:
            kind: of the strategy.
            traits: what it says of itself.
            workers: by region.
            mode: `train.mode`.
            stragglers: whether steps do without late workers.

        Raises:
            ValueError: naming the key.
        """
        where = "train.elastic"
        if stragglers:
            raise ValueError(
                f"{where}: with train.stragglers steps do without late workers, in another way: "
                "give one of the two"
            )
        if self.min_workers > max(workers.values()):
            raise ValueError(
                f"{where}.min_workers: no region has more than {max(workers.values())} workers"
            )
        if self.batch == "follows" and mode == "async":
            raise ValueError(
                f"{where}.batch: with train.mode async each push is a step of its own, whoever is "
                "there: leave the key out"
            )
        if self.rate == "same":
            return
        if self.batch == "fixed":
            raise ValueError(
                f"{where}.rate: with batch fixed a step has always the same rows: leave it out"
            )
        inside = traits.region.rate_key == _INNER_RATE and not traits.region.worker_steps
        if len(workers) > 1 and not inside:
            raise ValueError(
                f"{where}.rate: '{kind}' does not train with {_INNER_RATE} at the parameter "
                "server: use same"
            )
