"""`geo_ray.profile_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from geo_ray.api.inputs import Config, FilePath, Overrides, own_threads_kept, source_of
from geo_ray.api.progress import progress_bar
from geo_ray.api.tables import Table
from geo_ray.api.watch import RunWatch, ShowProgress
from geo_ray.comparison.loss_file import opened
from geo_ray.comparison.loss_run import LossTask, kept_codecs_at, measure_loss, still_to_do
from geo_ray.comparison.run import default_jobs
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.config.source import override_items
from geo_ray.errors import ConfigError
from geo_ray.job.build import check_device, parameter_count
from geo_ray.job.loss.files import default_path
from geo_ray.job.loss.grid import LossWanted, loss_cases
from geo_ray.job.loss.subject import subject_of
from geo_ray.job.model_id import model_id
from geo_ray.observe.html_view import html_view
from geo_ray.planning.loss_profile import LossProfile
from geo_ray.planning.loss_table import MeasuredLoss, differences
from geo_ray.tasks.load import load_task


@dataclass(frozen=True, repr=False)
class LossProfileResult:
    """What intervals and codecs cost a task in loss.

    Attributes:
        profile: everything that was measured.
        path: the file that has it.
        left_out: why an interval or codec was not measured.
    """

    profile: LossProfile
    path: Path
    left_out: tuple[str, ...] = ()

    def table(self) -> Table:
        """A row per interval and codec: mean of the relative loss, and the upper end that counts.

        Codecs are compared with the same interval without codec, intervals with plain training.
        """
        found = differences(self.profile)
        return Table(
            [
                {
                    "interval": interval,
                    "codec": codec,
                    "loss": _mean(self.profile.by_key[interval, codec].losses),
                    "mean": each.mean,
                    "upper": each.upper,
                }
                for (interval, codec), each in found.items()
            ]
        )

    def loss(self, interval: int, codec: str | None = None) -> float:
        """The relative loss that a plan counts for an interval, in local steps, and a codec."""
        return MeasuredLoss.of(self.profile).loss(interval, codec, trains_on=False)

    def __repr__(self) -> str:
        profile = self.profile
        runs = f"{len(profile.points) + 1} x {len(profile.seeds)} runs of {profile.steps} steps"
        return f"<LossProfile {self.path}: {runs}>"

    def _repr_html_(self) -> str:
        headings = ("interval", "codec", "mean", "counts")
        rows = [
            (str(interval), codec or "none", f"{each.mean:+.2%}", f"{each.upper:.2%}")
            for (interval, codec), each in differences(self.profile).items()
        ]
        return html_view(repr(self)[1:-1], headings, rows)


@dataclass(frozen=True, slots=True)
class LossGrid:
    """What `profile_loss` is to measure.

    Attributes:
        intervals: in steps; default: the configured one, and those of the section ``plan`` or 1,
            4, 16 and 64, as far as at least two fit into the steps.
        codecs: None for none; default: those that a plan chooses among.
        steps: local steps of each run.
        seeds: runs of each.
        jobs: runs side by side; default: as many as there are cores.
        fresh: measure again what an earlier measurement of the very same has.
    """

    intervals: Sequence[int] | None = None
    codecs: Sequence[str | None] | None = None
    steps: int = 200
    seeds: int = 3
    jobs: int | None = None
    fresh: bool = False


def profile_loss(
    config: Config,
    overrides: Overrides = (),
    *,
    grid: LossGrid | None = None,
    out: FilePath | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> LossProfileResult:
    """Measure what long intervals and codecs cost in loss, by short simulated runs, for `plan`.

    Args:
        config: a file, a mapping, or what `load_config` gave.
        overrides: changes of single keys.
        grid: what to measure; what an earlier measurement of the very same has is not repeated.
        out: the file; default: ``RUN.DIR/profiles/loss/NAME.json``.
        progress: say on standard error how far it is.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: there is nothing to measure, or no plan for this strategy or codec.
        ProfileError: nothing can be compared.
        GeoRayError: whatever ends a run early; what was measured is kept.
    """
    grid = grid or LossGrid()
    _check(grid)
    watch = RunWatch(progress)
    with own_threads_kept():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        path = default_path(experiment) if out is None else Path(out)
        check_device(experiment)
        wanted = LossWanted(grid.steps, grid.intervals, grid.codecs)
        cases = loss_cases(experiment, source.parent, wanted)
        model_params = parameter_count(load_task(experiment.task, source.parent), experiment.seed)
        model = model_id(experiment, source.parent, model_params)
        task = LossTask(
            cases,
            subject_of(experiment, source.parent, model),
            source.parent,
            cases.steps,
            tuple(experiment.seed + number for number in range(grid.seeds)),
            grid.jobs or default_jobs(),
        )
        file = opened(path, task, fresh=grid.fresh)
        known, at = file.known, kept_codecs_at(task, file.known)
        if at is not None and at != cases.codecs_at:
            cases = loss_cases(experiment, source.parent, replace(wanted, codecs_at=at))
            task = replace(task, cases=cases)
        for text in cases.left_out:
            watch.tell(f"not measured: {text}")
        todo = still_to_do(task, known)
        if len(todo) < len(cases.all):
            watch.tell(
                f"{len(cases.all) - len(todo)} of {len(cases.all)} are known from {file.writes}"
            )
        if not experiment.strategy.traits.in_rounds and not experiment.links():
            watch.tell("no links are emulated: updates come as on links that take no time")
        found = known if len(todo) < len(cases.all) else None
        title = f"Measuring loss, {cases.steps} steps each"
        with progress_bar(title, len(todo) * grid.seeds, "runs", progress) as advance:
            for found in measure_loss(task, known, lambda _: advance(1)):
                file.keep(found)  # after each case: an interrupt loses few
        file.finish()
    assert found is not None, "there is an interval at least"  # noqa: S101
    return LossProfileResult(found, path, cases.left_out)


def _check(grid: LossGrid) -> None:
    if grid.seeds < 2:
        raise ConfigError(
            f"seeds: with {grid.seeds} nothing can be said of noise", fix="Give 2 or more."
        )
    if grid.steps < 1 or (grid.jobs or 1) < 1:
        raise ConfigError("steps and jobs: they are positive", fix="Give whole numbers.")
    if grid.intervals is not None and (not grid.intervals or min(grid.intervals) < 1):
        raise ConfigError(
            f"intervals: {list(grid.intervals)} are not positive", fix="Give whole numbers."
        )


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None
