"""Reading a queue from what is written down: how it stands, and what it will do."""

from __future__ import annotations

from geo_ray.errors import QueueMissingError
from geo_ray.queue.fitting import NowSeen
from geo_ray.queue.forecast import forecast
from geo_ray.queue.journal import QueueJournal
from geo_ray.queue.place import QueuePlace
from geo_ray.queue.report import QueueReport, report_of
from geo_ray.queue.slots import QueueSlots
from geo_ray.queue.state import QueueState


class QueueReader:
    """Reads a queue again and again, each time what is new; needs no cluster.

    Args:
        place: where it is.
    """

    def __init__(self, place: QueuePlace) -> None:
        self._place = place
        self._journal: QueueJournal | None = None
        self._state = QueueState()
        self._slots: QueueSlots | None = None
        self._asked = 0

    @property
    def state(self) -> QueueState:
        """As it was last read."""
        return self._state

    def read(self) -> QueueState:
        """Read on, and give how the queue stands.

        Raises:
            QueueMissingError: there is none.
            QueueJournalError: it cannot be understood.
        """
        self._journal = self._journal or QueueJournal(self._place.store())
        self._state.feed(self._journal.read())
        if self._state.config is None:
            raise QueueMissingError(f"there is no queue in {self._place.shown}")
        return self._state

    def report(self, unix_s: float) -> QueueReport:
        """Read on, and give how the queue stands and what it will do.

        Args:
            unix_s: the present time.
        """
        state = self.read()
        if state.config is None or not state.era.slots:
            return report_of(state)
        era = state.era
        if self._slots is None or (self._slots.number, self._asked) != (
            era.number,
            len(era.slots),
        ):
            self._slots = QueueSlots(state.config, era, state.jobs)
            self._asked = len(era.slots)
        now = NowSeen(unix_s, era.slots[-1].room)
        return report_of(state, forecast(state, state.config, self._slots, now))
