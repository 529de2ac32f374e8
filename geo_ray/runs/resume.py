"""Checks that a run can resume, and chooses which regions continue from its checkpoint.

The decisions, including the averager's region, are made before a cluster is started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pydantic import JsonValue

from geo_ray.base.errors import (
    CheckpointError,
    CheckpointMissingError,
    ConfigChangedError,
    ConfigError,
    RunFinishedError,
)
from geo_ray.base.load import digest
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import start_command
from geo_ray.runs.checkpoints import regions_in, store_of
from geo_ray.runs.directory import CONFIG_FILE, RunDirectory
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest, shard_part_name
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.totals import RunTotals
from geo_ray.training.config import AUTO
from geo_ray.training.membership import rows_of

_log = logging.getLogger(__name__)


def check_resumable(
    run: RunDirectory,
    saved: Experiment,
    wanted: Experiment,
    checkpoint: int | None = None,
    *,
    begins: bool = False,
) -> None:
    """Reject a resume without effect.

    Args:
        run: directory of the run.
        saved: configuration of the run.
        wanted: configuration to continue with.
        checkpoint: checkpoint given by the user; a finished run can then also continue from it.
        begins: whether a run without checkpoints may start from the beginning.

    Raises:
        RunFinishedError: it is finished and ``wanted`` requests no more training, or it has no
            checkpoint; names its model, and how to train further.
        CheckpointMissingError: it has no checkpoint, or ``wanted`` ends before that.
        ConfigChangedError: ``wanted`` has other codecs, regions or shards than the checkpoint, or
            an optimizer that cannot continue with its state.
    """
    totals = _totals(run)
    store = store_of(run, saved.checkpoint)
    has_checkpoint = bool(store.ids())
    if totals.started is not None and totals.started["simulated"]:
        raise CheckpointMissingError(
            f"{run.path} was simulated: simulations write no checkpoints",
            fix="Train it from the start: `geo-ray train CONFIG`.",
        )
    is_more = checkpoint is not None or _asks_for_more(saved, wanted)
    if totals.finished is not None and not (has_checkpoint and is_more):
        raise _finished(run, saved, totals, has_checkpoint=has_checkpoint)
    if not has_checkpoint and checkpoint is None and begins:
        return  # it starts from the beginning
    if not has_checkpoint:
        raise CheckpointMissingError(
            f"{run.path} ended before its first checkpoint",
            fix=f"Start again with `{start_command(saved.regions)} CONFIG`; checkpoint.every_s "
            "sets how often a run saves.",
        )
    if not wanted.is_served:  # its checkpoints can be divided again
        _check_regions(saved, wanted)
    _check_stores(saved, wanted)
    _check_optimizer(saved, wanted)
    taken = _taken(store, checkpoint)
    if taken is not None:  # otherwise the restore reports the error
        if taken.config_digest != (now := digest(saved)):
            _log.warning(
                "%s of %s (digest %.12s) is not the configuration that checkpoint %d was saved "
                "with (digest %.12s): values were changed in a resumption since, or the file was "
                "edited",
                CONFIG_FILE,
                run.shown,
                now,
                taken.id,
                taken.config_digest,
            )
        codecs = taken.extra.get("codecs")
        _check_codecs(codecs if isinstance(codecs, dict) else {}, wanted)
        check_strategy_kind(taken, wanted)
        _check_steps(taken, wanted)


def codecs_of(experiment: Experiment) -> dict[str, JsonValue]:
    """Return the codecs of a checkpoint's manifest: sections by direction, null for none."""
    codecs: dict[str, JsonValue] = experiment.codec.model_dump(mode="json")
    return {way: codecs[way] for way in ("up", "down")}


STRATEGY: Final = "strategy"
"""Key of a manifest of a run whose regions join: the kind of its strategy."""


def check_strategy_kind(taken: CheckpointManifest, wanted: Experiment) -> None:
    """Reject another strategy for regions that have joined, whose state is that of the strategy.

    Raises:
        ConfigChangedError: it is another one.
    """
    before, now = taken.extra.get(STRATEGY), wanted.strategy.kind
    if before not in (None, now):
        raise ConfigChangedError(
            f"strategy.kind is {now}, but that of checkpoint {taken.id} is {before}, whose state "
            "cannot be converted",
            fix=f"Resume with {before}, or start a new run.",
        )


def _check_regions(saved: Experiment, wanted: Experiment) -> None:
    """Reject other regions and numbers of shards, because a checkpoint cannot be divided again."""
    before = {region.name: region.ps_shards for region in saved.regions}
    now = {region.name: region.ps_shards for region in wanted.regions}
    for name in [*before, *now]:
        if name not in now:
            what = f"region '{name}' is in the run, but not in the configuration"
        elif name not in before:
            what = f"region '{name}' is not in the run"
        elif now[name] != before[name]:
            what = f"region '{name}' has {before[name]} parameter server shards in its checkpoints"
            what += f", but {now[name]} in the configuration (regions[].ps_shards)"
        else:
            continue
        raise ConfigChangedError(
            f"{what}; a checkpoint can only continue with its own regions and shards",
            fix="Resume with the regions and shards of the run, or start a new run.",
        )


def _check_optimizer(saved: Experiment, wanted: Experiment) -> None:
    """Reject another kind of optimizer, because its state cannot be converted; `sgd` has none."""
    before, now = saved.optimizer.kind, wanted.optimizer.kind
    unused = now == "sgd" and not saved.optimizer.needs_whole_parameters
    if before not in {now, "sgd"} and not unused:
        raise ConfigChangedError(
            f"optimizer.kind is {now}, but the checkpoint has the state of {before}, which cannot "
            "be converted",
            fix=f"Resume with {before}, or start a new run.",
        )


def _check_stores(saved: Experiment, wanted: Experiment) -> None:
    """Reject other stores, because a run's checkpoints do not move."""
    for key in ("store", "region_stores"):
        before, now = getattr(saved.checkpoint, key), getattr(wanted.checkpoint, key)
        if before != now:
            raise ConfigChangedError(
                f"checkpoint.{key} is {now or 'not set'}, but the run's checkpoints are in "
                f"{before or 'its own directory'}",
                fix="Resume with the stores of the run, or start a new run.",
            )


def _check_codecs(found: Mapping[str, JsonValue], wanted: Experiment) -> None:
    """Reject other codecs, because their residuals cannot be converted."""
    for way, section in codecs_of(wanted).items():
        before = found.get(way, section)
        if before == section:
            continue
        old, new = _own_file(before), _own_file(section)
        if old is not None and new is not None and old[0] == new[0] and old[1] != new[1]:
            raise ConfigChangedError(
                f"codec.{way} {old[0]}: the file differs from that of the checkpoint; the "
                "residuals "
                "of a codec cannot be converted",
                fix="Restore the file, or start a new run.",
            )
        raise ConfigChangedError(
            f"codec.{way} is {_named(section)}, but that of the checkpoint is {_named(before)}; "
            "the residuals of a codec cannot be converted",
            fix="Resume with the codecs of the checkpoint, or start a new run.",
        )


def _check_steps(taken: CheckpointManifest, wanted: Experiment) -> None:
    """Reject an end before the checkpoint, because the run would report wrong results."""
    steps, size = wanted.train.steps, wanted.data.batch_size
    if wanted.is_served and wanted.strategy.traits.region.ends_by_total_rows:
        return
    most = steps  # as counted by servers: every push in async mode
    if wanted.counts_total_rows:  # one region may take nearly all steps, with few rows per step
        pushed = min(min(region.batch_sizes or (size,)) for region in wanted.regions)
        most = wanted.rows // (pushed * max(1, wanted.worker_steps))
    elif wanted.train.mode == "async":
        most = steps * max(region.workers for region in wanted.regions)
    if taken.step <= most:
        return
    raise CheckpointMissingError(
        f"checkpoint {taken.id} was saved after {taken.step} steps, but train.steps is "
        f"{wanted.train.steps}: the run would end before it resumes",
        fix="Use an older one with --from ID (`geo-ray checkpoints RUN` lists them), or set "
        f"train.steps to {math.ceil(taken.step * steps / most)} or more.",
    )


def _taken(store: CheckpointStore, checkpoint: int | None) -> CheckpointManifest | None:
    """Return the manifest of the given checkpoint, or of the newest readable healthy one."""
    if checkpoint is not None:
        return store.manifest(checkpoint)
    found = []
    for id in reversed(store.ids()):
        try:
            manifest = store.manifest(id)
        except CheckpointError:
            continue
        if manifest.healthy:
            return manifest
        found.append(manifest)
    return found[0] if found else None


def _own_file(section: JsonValue) -> tuple[JsonValue, JsonValue] | None:
    """Return name and digest of a custom class; None for a built-in codec, or none."""
    if not isinstance(section, dict) or "use" not in section:
        return None
    return section["use"], section.get("sha256")


def _named(section: JsonValue) -> str:
    if not isinstance(section, dict):
        return "none"
    shown = {k: v for k, v in section.items() if k not in ("kind", "use", "sha256")}
    options = ", ".join(f"{key}: {value}" for key, value in shown.items())
    name = str(section.get("use", section.get("kind")))
    return f"{name} ({options})" if options else name


def _finished(
    run: RunDirectory, saved: Experiment, totals: RunTotals, *, has_checkpoint: bool
) -> RunFinishedError:
    model = f"its model is {run.model}" if run.model.exists() else "its model no longer exists"
    further = f"--set train.steps={2 * saved.train.steps}"
    if totals.stop_cause is not None:
        key = "patience" if totals.stop_reason == "patience" else "target"
        further = f"--set train.{key}=null"
    if has_checkpoint:
        fix = f"To train it further: `geo-ray train --resume RUN {further}`."
    else:
        often = "every_s=10" if saved.checkpoint.every_rounds is None else "every_rounds=1"
        fix = (
            "It has no checkpoint. For a longer run that saves more often: "
            f"`{start_command(saved.regions)} CONFIG {further} --set checkpoint.{often}`."
        )
    return RunFinishedError(f"{run.path} is finished after {totals.steps} steps; {model}", fix=fix)


def _asks_for_more(saved: Experiment, wanted: Experiment) -> bool:
    before, after = saved.train, wanted.train
    stops = (before.target, before.patience) != (after.target, after.patience)
    return after.steps > before.steps or stops


def _totals(run: RunDirectory) -> RunTotals:
    totals = RunTotals()
    path = run.path / EVENTS_FILE
    for event in read_events(path) if path.exists() else ():
        totals.feed(event)
    return totals


LOST: Final = "lost"
ROWS: Final = "rows"
"""Keys of lost regions, and of ledgers of absent regions, in a manifest."""


def left_out(
    experiment: Experiment, manifest: CheckpointManifest, away: Collection[str], *, asked: bool
) -> tuple[str, ...]:
    """Return the regions with state in a checkpoint that the resumed run excludes.

    Args:
        experiment: configuration of the resumed run.
        manifest: manifest of the checkpoint.
        away: regions that do not take part.
        asked: whether the user excluded them; otherwise too few regions may be left only because
            others joined since, and all regions of the checkpoint take part again.

    Raises:
        ConfigError: too few regions would be left.
    """
    before = regions_in(_names(manifest), experiment.regions)
    out = tuple(name for name in before if name in away)
    there = [name for name in before if name not in out]
    back = [name for name in _lost(manifest) if name not in (*before, *away)]
    least = experiment.members.min or 1
    if not out or (there and len(there) + len(back) >= least):
        return out
    if not asked:
        return ()
    names, left = ", ".join(before), ", ".join(there) or "no region"
    raise ConfigError(
        f"members.absent: checkpoint {manifest.id} has the state of {names}: {left} would remain, "
        f"but at least {least} are required",
        fix="List fewer regions in members.absent, or lower members.min.",
    )


def without_lost(
    experiment: Experiment, parts: Collection[str], away: Collection[str] = ()
) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment of a resumed run, and the regions that were lost before.

    Lost regions are absent, and everything else is unchanged: the total rows of the run, and its
    strategy, even with a single region. The averager is in its initial region, or in the region to
    which it would have moved when that region was lost.

    Args:
        experiment: the experiment with all regions.
        parts: names of the checkpoint's parts.
        away: regions in the checkpoint that leave.
    """
    before = regions_in(parts, experiment.regions)
    there = [name for name in before if name not in away]
    missing = tuple(name for name in experiment.region_names if name not in there)
    if not there or set(missing) == set(experiment.members.absent):
        return experiment, ()
    config, leader = experiment.averager, experiment.averager_region
    if leader not in there:
        leader = config.first_standby(leader, there) or there[0]
    # The new averager's region and lost regions are no standbys; others may be.
    named = [name for name in config.named_standbys if name in there and name != leader]
    standby, *more = named or [AUTO]
    averager: dict[str, object] = {"region": leader}
    if config.standby is not None:
        averager |= {"standby": standby, "next_standbys": tuple(more)}
    known = (*experiment.members.absent, *before)
    return experiment.model_copy(
        update={
            "members": experiment.members.model_copy(update={"absent": missing}),
            "averager": experiment.averager.model_copy(update=averager),
        }
    ), tuple(name for name in missing if name not in known)


def lost_before(manifest: CheckpointManifest, experiment: Experiment) -> tuple[str, ...]:
    """Return the regions that a checkpoint lacks because they were lost, not drained.

    Empty for a checkpoint of an earlier release, which does not record that.

    Args:
        manifest: manifest of the checkpoint.
        experiment: experiment of the resumed run.
    """
    lost, absent = _lost(manifest), experiment.members.absent
    there = regions_in(_names(manifest), experiment.regions)
    names = experiment.region_names
    return tuple(name for name in names if name in lost and name in absent and name not in there)


def saved_rows(found: Checkpoint, left: Collection[str]) -> dict[str, Mapping[str, object]]:
    """Return the row ledgers of absent regions by region, for when they rejoin.

    Args:
        found: the checkpoint.
        left: regions that leave there; the checkpoint lists those already absent.

    Raises:
        CheckpointCorruptError: a part of it changed since it was opened.
        StoreError: its store does not answer or refuses.
    """
    recorded = found.manifest.extra.get(ROWS)
    rows: dict[str, Mapping[str, object]] = {}
    if isinstance(recorded, dict):
        rows = {name: dict(each) for name, each in recorded.items() if isinstance(each, dict)}
    for name in left:
        control = found.meta(shard_part_name(name, 0)).get("control")
        rows[name] = rows_of(control if isinstance(control, dict) else {})
    return rows


def _names(manifest: CheckpointManifest) -> set[str]:
    return {part.name for part in manifest.parts}


def _lost(manifest: CheckpointManifest) -> Sequence[str]:
    recorded = manifest.extra.get(LOST)
    return [str(name) for name in recorded] if isinstance(recorded, list) else []
