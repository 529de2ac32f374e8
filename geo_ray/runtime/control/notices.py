"""Which workers are on machines that are about to be taken away, as far as Ray knows.

A cloud gives notice before it takes a spot instance; what hears it tells Ray to drain the node. Ray
starts nothing there any more and tells no actor, so it has to be asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")
log = logging.getLogger(__name__)

EVERY_S = 2.0


@dataclass(slots=True)
class DrainNotices:
    """See the module's docstring.

    Attributes:
        ask: gives the ids of the nodes that are being drained.
    """

    ask: Callable[[], Collection[str]]
    _draining: Collection[str] = ()
    _asked_s: float | None = None
    _asking: threading.Thread | None = None

    def concern(self, nodes: Mapping[Key, str], now_s: float) -> list[Key]:
        """Those of ``nodes`` that are being drained, as far as Ray has told.

        It is asked every few seconds, and not waited for: its control service may be gone.

        Args:
            nodes: ids of nodes, by whatever lives there.
            now_s: the present time.
        """
        due = self._asked_s is None or now_s - self._asked_s >= EVERY_S
        if due and (self._asking is None or not self._asking.is_alive()):
            self._asked_s = now_s
            self._asking = threading.Thread(target=self._ask, name="drain-notices", daemon=True)
            self._asking.start()
        return [key for key, node in nodes.items() if node in self._draining]

    def _ask(self) -> None:
        try:
            self._draining = frozenset(self.ask())
        except Exception as error:  # whatever it is: training goes on without notices
            log.warning("no notice of drains: %s", error)
