"""Rules for where data, gradients and checkpoints may be kept. Closed by default.

A rule names, for the data of a region, the regions where something made of them may be. Without a
rule for a region, anything but raw data may go anywhere. Raw data never leave their region; a rule
can only confirm that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.errors import PlanInfeasibleError


class Residency(StrictModel):
    """Rules by home region."""

    data: dict[str, tuple[str, ...]] = Field(
        {}, description="where raw data may be; only the home region itself can be carried out"
    )
    gradients: dict[str, tuple[str, ...]] = Field(
        {}, description="where updates that are made of a region's data may go"
    )
    checkpoints: dict[str, tuple[str, ...]] = Field(
        {}, description="where a model that has seen a region's data may be kept"
    )


def allowed_averagers(rules: Residency, regions: Sequence[str]) -> list[str]:
    """Return the regions that may host the averager, which sees every update and keeps the model.

    Args:
        rules: all of them.
        regions: of the job.

    Raises:
        PlanInfeasibleError: rules contradict each other or leave no region; names them.
    """
    for kind, table in (
        ("data", rules.data),
        ("gradients", rules.gradients),
        ("checkpoints", rules.checkpoints),
    ):
        _check_names(kind, table, regions)
    for home, places in rules.data.items():
        if home not in places:
            raise PlanInfeasibleError(
                f"residency.data: data of '{home}' may not be in '{home}', where they are",
                fix="Move the data, or correct the rule.",
            )
    left = list(regions)
    for kind, table in (("gradients", rules.gradients), ("checkpoints", rules.checkpoints)):
        for home, places in table.items():
            kept = [region for region in left if region in places]
            if not kept:
                raise PlanInfeasibleError(
                    f"residency.{kind}: what is made of data of '{home}' may only be in "
                    f"{', '.join(places) or 'no region'}, which other rules exclude; "
                    "no region can host the averager",
                    fix="Let one region receive updates of all, and keep the model.",
                )
            left = kept
    return left


def _check_names(kind: str, table: Mapping[str, Sequence[str]], regions: Sequence[str]) -> None:
    for home, places in table.items():
        for name in (home, *places):
            if name not in regions:
                raise PlanInfeasibleError(
                    f"residency.{kind}.{home}: there is no region '{name}'",
                    fix=f"Use one of {', '.join(regions)}.",
                )
