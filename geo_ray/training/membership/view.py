"""Who takes part in a run: a list with a number that grows by one with every change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from geo_ray.errors import CheckpointCorruptError, InvariantError, RegionLostError


@dataclass(frozen=True, slots=True)
class View:
    """The regions of a run at one time; the averager owns it.

    Attributes:
        members: the regions that take part, sorted.
        joining: those of them that are not there yet.
        lost: those that took part until they were lost, in that order.
        left: those that took part until they were asked to leave, in that order.
        epoch: 1 at the start of a run; grows by 1 with every change.
        giver: whose copies those begin as that are joining.
        since: the epochs from which on those take part that joined in this run, by region.
    """

    members: tuple[str, ...]
    joining: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    epoch: int = 1
    giver: str = ""
    since: tuple[tuple[str, int], ...] = ()

    def check(self, region: str, said_in: int = 0) -> None:
        """Refuse what a region says that does not take part.

        Args:
            region: who says it.
            said_in: epoch of the view that it knew then; 0 if it did not say.

        Raises:
            RegionLostError: it does no more: the others went on without it. Or it does again, and
                said this before they had.
            InvariantError: it never did.
        """
        if region in self.members:
            since = dict(self.since).get(region, 1)
            if 0 < said_in < since:
                raise RegionLostError(
                    f"region '{region}' said this in view {said_in}: the others went on without "
                    f"it, and it takes part again since view {since}"
                )
            return
        if region in (*self.lost, *self.left):
            raise RegionLostError(
                f"region '{region}' takes part no more: the others went on without it (view "
                f"{self.epoch})"
            )
        raise InvariantError(f"'{region}' is no member of this run")

    @property
    def told(self) -> int:
        """The epoch as messages have it, which leave the first one out."""
        return self.epoch if self.epoch > 1 else 0

    def without(self, region: str) -> View:
        """The next view: ``region`` is lost; the same one if it was before, or had left.

        Raises:
            InvariantError: it never took part.
        """
        if region in (*self.lost, *self.left):
            return self
        self.check(region)
        gone = self._of(name for name in self.members if name != region)
        return replace(gone, lost=(*self.lost, region), epoch=self.epoch + 1)

    def changed(self, joins: Sequence[str], leaves: Sequence[str], giver: str = "") -> View:
        """The next view: some join, who may have taken part before, and some leave.

        Args:
            joins: who were no members.
            leaves: who are members.
            giver: whose copies newcomers begin as.

        Raises:
            InvariantError: who joins is a member, who leaves is none, or nobody stays.
        """
        stay = [name for name in self.members if name not in leaves]
        if set(joins) & set(self.members) or set(leaves) - set(self.members) or not stay:
            raise InvariantError(
                f"{', '.join(self.members)} are members: {', '.join(joins) or 'nobody'} cannot "
                f"join and {', '.join(leaves) or 'nobody'} leave"
            )
        then = self._of([*stay, *joins])
        return replace(
            then,
            joining=tuple(sorted({*then.joining, *joins})),
            lost=tuple(name for name in self.lost if name not in joins),
            left=(*[name for name in self.left if name not in joins], *leaves),
            epoch=self.epoch + 1,
            giver=giver,
            since=(*then.since, *((name, self.epoch + 1) for name in sorted(joins))),
        )

    def begun(self, region: str) -> View:
        """The same view, in which ``region`` is there."""
        if region not in self.joining:
            return self
        return replace(self, joining=tuple(name for name in self.joining if name != region))

    def export(self) -> dict[str, object]:
        """Plain values for a checkpoint, in which nobody is joining."""
        return {"epoch": self.epoch, "lost": list(self.lost), "left": list(self.left)}

    def restored(self, saved: object) -> View:
        """This view, of a resumed run, after all changes of the run before.

        Args:
            saved: what `export` gave; None for a run in which nothing had changed.

        Raises:
            CheckpointCorruptError: it makes no sense.
        """
        if saved is None:
            return self
        if not isinstance(saved, Mapping):
            raise CheckpointCorruptError(f"the averager's view is {saved!r:.100}")
        epoch, lost, left = saved.get("epoch"), saved.get("lost"), saved.get("left", [])
        if type(epoch) is not int or not isinstance(lost, list) or not isinstance(left, list):
            raise CheckpointCorruptError(f"the averager's view is {saved!r:.100}")
        gone = [tuple(str(n) for n in names if n not in self.members) for names in (lost, left)]
        return replace(self, lost=gone[0], left=gone[1], epoch=epoch)

    def _of(self, names: Iterable[str]) -> View:
        members = tuple(sorted(names))
        joining = tuple(name for name in self.joining if name in members)
        since = tuple(pair for pair in self.since if pair[0] in members and pair[0] in self.members)
        return replace(self, members=members, joining=joining, since=since)
