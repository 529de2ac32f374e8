"""Evaluated parameters between their evaluation and its outcome: files of the run, soon gone.

Whoever has evaluated parameters is the only one who has exactly them: the region goes on training,
and other regions may have others. So they are written down there and then, before the result is
told, and whoever learns the result takes the file or drops it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from geo_ray.config.experiment import Experiment
from geo_ray.errors import RunDirectoryError
from geo_ray.training.compute.flat import digest
from geo_ray.util.atomic_file import TEMPORARY_SUFFIX, unwritable

log = logging.getLogger(__name__)

_DIRECTORY = "candidates"

Note = Callable[[int, Tensor, Tensor, bool], str | None]
"""`Candidates.note` of one region."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """See the module's docstring.

    Attributes:
        directory: where the files are.
        writers: regions whose parameters may be kept: the averager's, and all where it may move.
        together: whether regions are to tell which parameters they have evaluated, so that it can
            be seen that all of them have evaluated the same.
    """

    directory: Path
    writers: frozenset[str]
    together: bool

    @classmethod
    def of(cls, experiment: Experiment, run_dir: Path) -> Candidates | None:
        """Those of a run; None if it keeps no best model."""
        if experiment.train.keep_best is None:
            return None
        names = {experiment.averager_region}
        if experiment.averager.standby is not None:  # it may move anywhere
            names |= {*experiment.region_names}
        together = regions_agree(experiment) and len(experiment.regions) > 1
        return cls(run_dir / _DIRECTORY, frozenset(names), together)

    def prepare(self, *, anew: bool = True) -> None:
        """Make the directory.

        Args:
            anew: without what an earlier process has left there.

        Raises:
            RunDirectoryError: it cannot be made.
        """
        if anew:
            self.close()
        try:
            self.directory.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def close(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def note(
        self, region: str, step: int, params_P: Tensor, carried_B: Tensor, final: bool
    ) -> str | None:
        """Write evaluated parameters down, where they may be kept.

        A disk that is full must not end a training: who wants the file will miss it, and say so.

        Args:
            region: whose.
            step: of the evaluation.
            params_P: fp32 (P,), exactly as they were evaluated.
            carried_B: what the model carried beside them, uint8 (B,); empty if nothing.
            final: whether it is the last one.

        Returns:
            Their digest, if it is to be told.
        """
        if region in self.writers:
            path = self._path(region, step, final=final)
            temporary = path.with_suffix(TEMPORARY_SUFFIX)
            try:
                tensors = {"params": params_P.detach()}
                if carried_B.numel():
                    tensors["carried"] = carried_B.clone()
                save_file(tensors, temporary)
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                log.warning("the evaluated parameters cannot be written to %s: %s", path, error)
                temporary.unlink(missing_ok=True)
        # What is exchanged beside them is equal where parameters are; the rest is a region's own.
        return digest(params_P) if self.together else None

    def take(self, region: str, step: int, *, final: bool) -> tuple[Tensor, Tensor | None]:
        """The parameters of an evaluation, fp32 (P,), and what was carried beside them.

        Raises:
            RunDirectoryError: they were not written, or cannot be read.
        """
        path = self._path(region, step, final=final)
        try:
            found = load_file(path)
            return found["params"], found.get("carried")
        except (OSError, SafetensorError, KeyError) as error:
            raise RunDirectoryError(
                f"the parameters that region '{region}' evaluated at step {step} cannot be read "
                f"from {path}: {error}",
                fix="Let all workers reach `run.dir`, with room for the model there.",
            ) from error

    def drop(self, region: str, step: int, *, final: bool) -> None:
        """Remove the parameters of an evaluation, if they are there."""
        self._path(region, step, final=final).unlink(missing_ok=True)

    def _path(self, region: str, step: int, *, final: bool) -> Path:
        return self.directory / f"{region}-{step}{'-final' if final else ''}.safetensors"


def regions_agree(experiment: Experiment) -> bool:
    """Whether the regions of a run evaluate one and the same model, whenever they evaluate.

    They do in rounds for which everybody waits, if what is evaluated is what the averager knows, or
    if it is the region's own model just after a round.
    """
    train, traits = experiment.train, experiment.strategy.traits
    if len(experiment.regions) == 1:
        return True
    if train.mode == "async" or train.stragglers is not None or experiment.counts_together:
        return False
    up = experiment.codec.up
    if up is not None and up.traits.differential is not None:
        return False
    exchange = traits.exchange
    if not traits.in_rounds or exchange.stands_still != "always":
        return False
    if train.evaluate == "outer" and traits.region.eval_params is not None:
        return True
    return exchange.fragments == 1 and train.eval_every % exchange.every == 0
