"""Check that a run can resume, and choose what continues from its checkpoint.

Decided before a cluster is started: which regions continue, and where the averager runs.
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
    """Refuse to resume where nothing would come of it.

    Args:
        run: the directory of the run.
        saved: the configuration that the run went by.
        wanted: the one to go on with.
        checkpoint: the one that the user has named; then also a finished run goes on from there.
        begins: whether a run that never saved may start from the beginning.

    Raises:
        RunFinishedError: it is finished and ``wanted`` asks for no more, or it has no checkpoint
            to go on from; says where its model is, and how to train further.
        CheckpointMissingError: it has no checkpoint, or ``wanted`` ends before that.
        ConfigChangedError: ``wanted`` has other codecs than the checkpoint was made with, or other
            regions or shards.
    """
    totals = _totals(run)
    store = store_of(run, saved.checkpoint)
    has_checkpoint = bool(store.ids())
    if totals.started is not None and totals.started["simulated"]:
        raise CheckpointMissingError(
            f"{run.path} was simulated: the checkpoints of a simulation are not written",
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
            fix="Start again with `geo-ray train CONFIG`; checkpoint.every_s says how often a run "
            "saves.",
        )
    _check_regions(saved, wanted)
    _check_stores(saved, wanted)
    taken = _taken(store, checkpoint)
    if taken is not None:  # else whoever restores it says what is wrong with it
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
        _check_steps(taken, wanted)


def codecs_of(experiment: Experiment) -> dict[str, JsonValue]:
    """The codecs as a checkpoint's manifest has them: sections by direction, null for none."""
    codecs: dict[str, JsonValue] = experiment.codec.model_dump(mode="json")
    return {way: codecs[way] for way in ("up", "down")}


def _check_regions(saved: Experiment, wanted: Experiment) -> None:
    """Refuse other regions and other numbers of shards: a checkpoint is not cut anew."""
    before = {region.name: region.ps_shards for region in saved.regions}
    now = {region.name: region.ps_shards for region in wanted.regions}
    for name in [*before, *now]:
        if name not in now:
            what = f"region '{name}' is a part of the run, and not of the configuration"
        elif name not in before:
            what = f"region '{name}' is no part of the run"
        elif now[name] != before[name]:
            what = f"region '{name}' has {before[name]} parameter server shards in its checkpoints"
            what += f", and {now[name]} in the configuration (regions[].ps_shards)"
        else:
            continue
        raise ConfigChangedError(
            f"{what}; a checkpoint goes on with the regions and shards that it was made with",
            fix="Resume with the regions and shards of the run, or begin a new one.",
        )


def _check_stores(saved: Experiment, wanted: Experiment) -> None:
    """Refuse other stores: a run's checkpoints stay where they are."""
    for key in ("store", "region_stores"):
        before, now = getattr(saved.checkpoint, key), getattr(wanted.checkpoint, key)
        if before != now:
            raise ConfigChangedError(
                f"checkpoint.{key} is {now or 'not set'}, the run's checkpoints are in "
                f"{before or 'its own directory'}",
                fix="Resume with the stores of the run, or begin a new one.",
            )


def _check_codecs(found: Mapping[str, JsonValue], wanted: Experiment) -> None:
    """Refuse other codecs: what they owe to other regions cannot be taken over."""
    for way, section in codecs_of(wanted).items():
        before = found.get(way, section)
        if before == section:
            continue
        old, new = _own_file(before), _own_file(section)
        if old is not None and new is not None and old[0] == new[0] and old[1] != new[1]:
            raise ConfigChangedError(
                f"codec.{way} {old[0]}: the file is not the one that the checkpoint was made "
                "with; what a codec owes to other regions cannot be taken over",
                fix="Restore the file, or begin a new run.",
            )
        raise ConfigChangedError(
            f"codec.{way} is {_named(section)}, the checkpoint was made with {_named(before)}; "
            "what a codec owes to other regions cannot be taken over",
            fix="Resume with the codecs of the checkpoint, or begin a new run.",
        )


def _check_steps(taken: CheckpointManifest, wanted: Experiment) -> None:
    """Refuse to end before the checkpoint: the run would report what it has not done."""
    steps, size = wanted.train.steps, wanted.data.batch_size
    most = steps  # as servers count them: in async mode every push is one
    if wanted.counts_total_rows:  # one region may do nearly all, with few rows at once
        pushed = min(min(region.batch_sizes or (size,)) for region in wanted.regions)
        most = wanted.rows // (pushed * max(1, wanted.worker_steps))
    elif wanted.train.mode == "async":
        most = steps * max(region.workers for region in wanted.regions)
    if taken.step <= most:
        return
    raise CheckpointMissingError(
        f"checkpoint {taken.id} was saved after {taken.step} steps, and train.steps is "
        f"{wanted.train.steps}: the run would end before it goes on",
        fix="Name an older one with --from ID (`geo-ray checkpoints RUN` lists them), or set "
        f"train.steps to {math.ceil(taken.step * steps / most)} or more.",
    )


def _taken(store: CheckpointStore, checkpoint: int | None) -> CheckpointManifest | None:
    """The manifest that is named; else of the newest readable one, if any is healthy of those."""
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
    """Name and digest of a class of the user's; None for a codec of the library, or none."""
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
    model = f"its model is {run.model}" if run.model.exists() else "its model is not there any more"
    further = f"--set train.steps={2 * saved.train.steps}"
    if totals.stop_cause is not None:
        further = "--set train.target=null"
    if has_checkpoint:
        fix = f"To train it further: `geo-ray train --resume RUN {further}`."
    else:
        fix = (
            "It took no checkpoint to go on from. For a longer run, which saves more often: "
            f"`geo-ray train CONFIG {further} --set checkpoint.every_s=10`."
        )
    return RunFinishedError(f"{run.path} is finished after {totals.steps} steps; {model}", fix=fix)


def _asks_for_more(saved: Experiment, wanted: Experiment) -> bool:
    return wanted.train.steps > saved.train.steps or wanted.train.target != saved.train.target


def _totals(run: RunDirectory) -> RunTotals:
    totals = RunTotals()
    path = run.path / EVENTS_FILE
    for event in read_events(path) if path.exists() else ():
        totals.feed(event)
    return totals


LOST: Final = "lost"
ROWS: Final = "rows"
"""Regions that were lost, and books of rows of those that took no part, among what a manifest has
beside its parts."""


def left_out(
    experiment: Experiment, manifest: CheckpointManifest, away: Collection[str], *, asked: bool
) -> tuple[str, ...]:
    """The regions whose state a checkpoint has, and without which the run goes on from there.

    Args:
        experiment: as it is to go on.
        manifest: the checkpoint's.
        away: regions that are not to take part.
        asked: whether who resumes has said so; else too few regions would be left only because
            others joined since, and those of the checkpoint all take part again.

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
    names, left = ", ".join(before), ", ".join(there) or "nobody"
    raise ConfigError(
        f"members.absent: checkpoint {manifest.id} has the state of {names}: {left} would be left, "
        f"and at least {least} must be",
        fix="Name fewer regions in members.absent, or a smaller members.min.",
    )


def without_lost(
    experiment: Experiment, parts: Collection[str], away: Collection[str] = ()
) -> tuple[Experiment, tuple[str, ...]]:
    """An experiment as it goes on from a checkpoint, and the regions that were lost before that.

    They are absent now, and everything else is as it was: the run's rows, which are counted over
    all regions, and its strategy, though one region be left. The averager lives where it lived
    at the start, or where it would have gone when that region was lost.

    Args:
        experiment: with all regions.
        parts: names of the checkpoint's.
        away: regions that it has, and that leave there.
    """
    before = regions_in(parts, experiment.regions)
    there = [name for name in before if name not in away]
    missing = tuple(name for name in experiment.region_names if name not in there)
    if not there or set(missing) == set(experiment.members.absent):
        return experiment, ()
    config, leader = experiment.averager, experiment.averager_region
    if leader not in there:
        leader = config.first_standby(leader, there) or there[0]
    # Who has taken over, or is lost, stands by no more; whoever is left may.
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
    """The regions that a checkpoint lacks because they were lost, and not asked to leave.

    Of a checkpoint that does not say so, of a release before, none.

    Args:
        manifest: the checkpoint's.
        experiment: as it goes on from there.
    """
    lost, absent = _lost(manifest), experiment.members.absent
    there = regions_in(_names(manifest), experiment.regions)
    names = experiment.region_names
    return tuple(name for name in names if name in lost and name in absent and name not in there)


def saved_rows(found: Checkpoint, left: Collection[str]) -> dict[str, Mapping[str, object]]:
    """The books of rows of regions that a run goes on without, by region, for when they come back.

    Args:
        found: the checkpoint.
        left: the regions that leave there; it knows of those that took no part itself.

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
