"""Decides which changes of a run's members are made, and says why others are not. It does nothing.

Idea: a request is refused at once, with the reason, where it could not come to a good end: later a
newcomer's machines would have been paid for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from geo_ray.config.experiment import Experiment
from geo_ray.runtime.control.membership.member_requests import MemberRequest
from geo_ray.training.membership.config import why_fixed, why_nobody_joins


@dataclass(frozen=True, slots=True)
class MemberPolicy:
    """See the module's docstring.

    Attributes:
        experiment: the run.
    """

    experiment: Experiment

    @property
    def brings_back(self) -> bool:
        """Whether regions that are lost are brought back."""
        experiment = self.experiment
        shards = {each.name: each.ps_shards for each in experiment.regions}
        return (
            experiment.members.rejoin
            and self._fixed is None
            and len(shards) > 1
            and why_nobody_joins(shards) is None
        )

    @property
    def may_change(self) -> bool:
        """Whether regions can leave."""
        return self._fixed is None

    @property
    def least(self) -> int | None:
        """Regions that must be there; None: all that have not left."""
        return self.experiment.members.min

    @property
    def _fixed(self) -> str | None:
        experiment = self.experiment
        return why_fixed(
            experiment.overlay.kind,
            experiment.codec,
            has_transfers=experiment.transfers is not None,
        )

    def refusal(
        self,
        request: MemberRequest,
        members: Collection[str],
        pending: Collection[str],
        *,
        home: str,
        standby: str | None,
        is_ending: bool,
    ) -> str | None:
        """Why a request is not carried out; None if it is.

        Args:
            request: what is asked.
            members: the regions that take part.
            pending: regions that are about to join or leave.
            home: where the averager lives.
            standby: who may take over from there; None if nobody does.
            is_ending: whether the run is told to finish or to halt.
        """
        region, experiment = request.region, self.experiment
        if region not in experiment.region_names:
            known = ", ".join(experiment.region_names)
            return f"there is no region '{region}'; regions of this run are {known}"
        if is_ending:
            return "the run is about to end"
        if region in pending:
            return f"region '{region}' is joining or leaving already"
        if self._fixed is not None:
            return self._fixed
        if request.verb == "add":
            return self._no_newcomer(region, members)
        stays = home if standby is None else ""
        return self._no_leaver(region, members, stays)

    def _no_newcomer(self, region: str, members: Collection[str]) -> str | None:
        if region in members:
            return f"region '{region}' takes part already"
        shards = {each.name: each.ps_shards for each in self.experiment.regions}
        return why_nobody_joins(shards)

    def _no_leaver(self, region: str, members: Collection[str], stays: str) -> str | None:
        least = self.experiment.members.min or 1
        if region not in members:
            return f"region '{region}' does not take part"
        if region == stays:
            return f"region '{region}' hosts the averager, and nobody stands by for it"
        if len(members) - 1 < least:
            regions = "1 region" if least == 1 else f"{least} regions"
            here = "1 is" if len(members) == 1 else f"{len(members)} are"
            return f"members.min asks for {regions}, and {here} here"
        return None
