"""`bytelm` with a number of held-out rows that an evaluation inside a step can afford."""

from __future__ import annotations

from pydantic import Field

from geo_ray.data.tasks.base import Dataset
from geo_ray.data.tasks.bytelm import ByteLM


class PeersTask(ByteLM):
    """The same model and text, fewer held-out rows: spread evenly over the held-out text."""

    class Options(ByteLM.Options):
        """Options of `bytelm`, and one more."""

        heldout_rows: int = Field(default=128, ge=2, description="held-out rows of all regions")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._heldout_rows = options.heldout_rows

    def dataset(self, seed: int) -> Dataset:
        """All training rows, some of the held-out ones."""
        whole = super().dataset(seed)
        heldout = whole.heldout["tokens"]
        every = max(1, len(heldout) // self._heldout_rows)
        return Dataset(whole.train, {"tokens": heldout[::every][: self._heldout_rows]})
