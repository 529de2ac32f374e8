"""Which requests the averager has taken in, how it answered them, and who has said its last word.

Requests are numbered by (region, epoch, seq), and a region has one open at most. So the newest
number of each region says whether a request is a repetition, and its newest answer is all that a
repetition may ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

from geo_ray.strategies.base import Reply, Update
from geo_ray.training.exchange.saved import load_messages, save_messages

OPEN: Final = "open/"
"""Prefix of tensors of messages that were open, or answered, at a cut."""


@dataclass(slots=True)
class AveragerBooks:
    """See the module's docstring.

    Attributes:
        last: epoch and number of every region's newest request that was taken in or given up.
        answers: the newest answer to each region, as it was sent.
        finals: final updates that wait for those of all others.
    """

    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    answers: dict[str, Reply] = field(default_factory=dict)
    finals: dict[str, Update] = field(default_factory=dict)

    def newest(self, region: str) -> tuple[int, int]:
        """Epoch and number of the newest request of ``region``; zeros if there was none."""
        return self.last.get(region, (0, 0))

    def is_known(self, update: Update) -> bool:
        """Whether ``update`` is a repetition."""
        return (update.epoch, update.seq) <= self.newest(update.region)

    def has_finals(self, members: Sequence[str]) -> bool:
        """Whether all have said their last word."""
        return all(name in self.finals for name in members)

    def take(self, update: Update) -> None:
        """``update`` is taken in, or given up; what was answered before is over."""
        self.last[update.region] = (update.epoch, update.seq)

    def unanswered(self, members: Sequence[str]) -> dict[str, int]:
        """The numbers of the requests that were taken in and not answered yet, by region."""
        answered = {region: reply.seq for region, reply in self.answers.items()}
        return {
            region: seq
            for region, (_, seq) in self.last.items()
            if region in members and answered.get(region) != seq
        }

    def join(self, region: str, giver: str) -> None:
        """A region begins as a copy of another one: with its numbers, and no answer.

        Epochs are a region's own. The giver's may be later than the newcomer's, where both came up
        side by side, and all that the newcomer says would pass for a repetition.
        """
        self.answers.pop(region, None)
        self.last[region] = (self.newest(region)[0], self.newest(giver)[1])

    def leave(self, region: str) -> None:
        """A region takes part no more; its numbers stay, so that what it says late is known."""
        self.finals.pop(region, None)
        self.answers.pop(region, None)

    @property
    def is_ending(self) -> bool:
        """Whether a region has said its last word, or is told to, and not all have."""
        return bool(self.finals) or any(r.stop and not r.final for r in self.answers.values())

    def live(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]]:
        """Tensors that will change, tensors that will not, and plain values.

        Final updates lie in their senders' buffers until they are answered. Answers are as they
        were sent, and never change.
        """
        finals, final_rows = save_messages(OPEN + "finals", list(self.finals.values()))
        answers, answer_rows = save_messages(OPEN + "answers", list(self.answers.values()))
        return finals, answers, {"finals": final_rows, "answers": answer_rows}

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        last: Mapping[str, Sequence[int]],
        exchanges: Mapping[str, object],
        *,
        closing: bool,
    ) -> None:
        """Become what `live` saved.

        What answers asked of regions is over, but for the end (see `keep_stops`).

        Args:
            tensors: by name.
            last: numbers by region.
            exchanges: the plain values.
            closing: whether those that were told to finish with the next round still are.

        Raises:
            CheckpointCorruptError: if messages cannot be read.
        """
        self.last = {str(r): (int(pair[0]), int(pair[1])) for r, pair in last.items()}
        finals = load_messages(Update, tensors, exchanges.get("finals"))
        self.finals = {update.region: update for update in finals}
        self.answers.clear()
        for reply in load_messages(Reply, tensors, exchanges.get("answers")):
            reply = replace(reply, checkpoint=None, halt=False, closing=reply.closing and closing)
            self.answers[reply.to] = reply

    def keep_stops(self, stopping: bool, *, of_last_words: bool) -> None:
        """Restored answers tell regions to finish only if that is still meant.

        Args:
            stopping: whether it is.
            of_last_words: whether it is also for those whose last word is answered.
        """
        for region, reply in self.answers.items():
            stop = reply.stop and stopping and (of_last_words or not reply.final)
            self.answers[region] = replace(reply, stop=stop)
