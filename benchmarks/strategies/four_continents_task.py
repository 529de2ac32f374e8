"""What `four_continents.py` trains: `bytelm` with a held-out text that two cores get through."""

from __future__ import annotations

from geo_ray.data.tasks.base import Dataset
from geo_ray.data.tasks.bytelm import ByteLM

HELDOUT_ROWS = 128


class FewHeldOut(ByteLM):
    """The task without most of its held-out rows."""

    def dataset(self, seed: int) -> Dataset:
        """Return the text; of the held-out one evenly spaced rows."""
        whole = super().dataset(seed)
        apart = max(1, len(whole.heldout["tokens"]) // HELDOUT_ROWS)
        kept = whole.heldout["tokens"][::apart][:HELDOUT_ROWS]
        return Dataset(train=whole.train, heldout={"tokens": kept})
