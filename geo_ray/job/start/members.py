"""Which regions a run goes on with from a checkpoint, and where its averager lives then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from geo_ray.checkpoint.manifest import CheckpointManifest
from geo_ray.checkpoint.names import shard_part_name
from geo_ray.checkpoint.store import Checkpoint
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError
from geo_ray.job.checkpoints import regions_in
from geo_ray.training.averager.config import AUTO
from geo_ray.training.membership.newcomer import rows_of

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
    config, home = experiment.averager, experiment.averager_region
    if home not in there:
        home = config.first_standby(home, there) or there[0]
    # Who has taken over, or is lost, stands by no more; whoever is left may.
    named = [name for name in config.named_standbys if name in there and name != home]
    standby, *more = named or [AUTO]
    averager: dict[str, object] = {"region": home}
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


def kept_rows(found: Checkpoint, left: Collection[str]) -> dict[str, Mapping[str, object]]:
    """The books of rows of regions that a run goes on without, by region, for when they come back.

    Args:
        found: the checkpoint.
        left: the regions that leave there; it knows of those that took no part itself.

    Raises:
        CheckpointCorruptError: a part of it changed since it was opened.
        StoreError: its store does not answer or refuses.
    """
    told = found.manifest.extra.get(ROWS)
    rows: dict[str, Mapping[str, object]] = {}
    if isinstance(told, dict):
        rows = {name: dict(each) for name, each in told.items() if isinstance(each, dict)}
    for name in left:
        control = found.meta(shard_part_name(name, 0)).get("control")
        rows[name] = rows_of(control if isinstance(control, dict) else {})
    return rows


def _names(manifest: CheckpointManifest) -> set[str]:
    return {part.name for part in manifest.parts}


def _lost(manifest: CheckpointManifest) -> Sequence[str]:
    told = manifest.extra.get(LOST)
    return [str(name) for name in told] if isinstance(told, list) else []
