"""Decisions about members: which requests are granted, who leaves on notice, who returns. Pure.

A request that cannot succeed is refused at once with its reason. A region whose servers get a
termination notice drains at once, and is dropped `AT_ONCE_S` before the machine goes. A lost
region is brought back at once, then with exponential backoff from `FIRST_S` to `LONGEST_S`.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.requests import MemberRequest
from geo_ray.training.config import why_fixed, why_nobody_joins

AT_ONCE_S: Final = 2.0
"""Before a machine goes, the others go on without a region that has not come to a border."""


def leave_on_notice(
    left_s: Mapping[str, float],
    members: Collection[str],
    leaving: Collection[str],
    needed: Collection[str],
) -> dict[str, Literal["leave", "lose"]]:
    """What is done about notices now.

    Args:
        left_s: how long servers of regions will be there still, by region.
        members: the regions that take part.
        leaving: those of them that are asked to leave already, for whatever reason.
        needed: those of them that the run cannot go on without.

    Returns:
        Regions to be asked to leave, and those to go on without at once.
    """
    answers: dict[str, Literal["leave", "lose"]] = {}
    stay = [name for name in members if name not in leaving]
    for region in sorted(left_s, key=lambda name: (left_s[name], name)):
        if region not in members or region in needed:
            continue
        if region in leaving:
            if left_s[region] <= AT_ONCE_S:
                answers[region] = "lose"
        elif len(stay) > 1:
            answers[region] = "leave"
            stay.remove(region)
    return answers


QUIET_S: Final = 120.0
FIRST_S: Final = 10.0
LONGEST_S: Final = 320.0


@dataclass(slots=True)
class _Absence:
    """What is remembered of a region.

    Attributes:
        attempts: to bring it back, with no quiet time since.
        joined_s: when it was back last; None: it has not been since it was lost.
        due_s: when to try next; None: it is there, or on its way.
    """

    attempts: int = 0
    joined_s: float | None = None
    due_s: float | None = None


@dataclass(slots=True)
class Returns:
    """Decides when regions that were lost are to come back. Pure.

    Idea: most losses are of one process, and the region is back within seconds; a machine that
        fails
    again and again must not cost the others a border each time.

    Rule: a region is brought back at once. If it does not come up, or is lost again within
        `QUIET_S` of
    having been back, it waits `FIRST_S` before the next attempt, then twice as long each time, at
    most `LONGEST_S`. A region that was asked to leave, or to be removed, is not brought back.

    Source: ours; exponential backoff, as everywhere. Times are seconds of one clock.
    """

    _absences: dict[str, _Absence] = field(default_factory=dict)

    def lost(self, region: str, now_s: float) -> float:
        """A region is lost, or an attempt to bring it back has failed; seconds until the next."""
        absence = self._absences.setdefault(region, _Absence())
        if absence.joined_s is not None and now_s - absence.joined_s >= QUIET_S:
            absence.attempts = 0
        wait_s = 0.0
        if absence.attempts:
            wait_s = min(LONGEST_S, FIRST_S * 2 ** (absence.attempts - 1))
        absence.joined_s, absence.due_s = None, now_s + wait_s
        return wait_s

    def joined(self, region: str, now_s: float) -> None:
        """It is back."""
        if region in self._absences:
            self._absences[region].joined_s = now_s

    def forget(self, region: str) -> None:
        """It is not to come back by itself."""
        self._absences.pop(region, None)

    def due(self, now_s: float) -> list[str]:
        """Regions to bring back now; they count as on their way then."""
        found = []
        for region, absence in self._absences.items():
            if absence.due_s is not None and now_s >= absence.due_s:
                absence.due_s = None
                absence.attempts += 1
                found.append(region)
        return found


@dataclass(frozen=True, slots=True)
class MemberPolicy:
    """Decides which changes of a run's members are made, and says why others are not. Pure.

    Idea: a request is refused at once, with the reason, where it could not come to a good end:
        later a
    newcomer's machines would have been paid for nothing.

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
