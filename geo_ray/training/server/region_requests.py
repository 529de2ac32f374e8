"""What a region says with an update of the time since its last one, and the request that is open.

A region has at most one request open at the averager; its number, what lies in it and what is said
beside it belong together. When to send is decided in `geo_ray.training.server.server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from geo_ray.strategies.base import Update
from geo_ray.training.exchange.saved import load_messages, save_messages
from geo_ray.training.server.effects import SendUpdate

_REQUEST: Final = "request"  # prefix of the open request's tensors


@dataclass(slots=True)
class RegionRequests:
    """See the module's docstring.

    Attributes:
        seq: number of the newest request.
        is_open: whether it is not answered yet.
        request: the open one.
        samples: rows since the last update.
        compute_s: seconds of computing in the steps since then, one after another.
        step_s: of one step, over those before the last update.
        exchange_s: of the last exchange, without what the averager held it.
        sent_at: steps applied before the newest request.
        view: epoch of the newest view that answers were given in; 0: the first.
    """

    seq: int = 0
    is_open: bool = False
    request: SendUpdate | None = None
    samples: int = 0
    compute_s: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0
    sent_at: int = 0
    view: int = 0
    _sent_samples: int = 0  # behind the open request

    def stepped(self, samples: int, compute_s: float) -> None:
        """A step was applied."""
        self.samples += samples
        self.compute_s += compute_s

    def send(self, update: Update, *, version: int, blocking: bool) -> SendUpdate:
        """Open the next request.

        Args:
            update: what it says, but for its number and for the steps behind it.
            version: steps applied.
            blocking: whether the region stands still for it.
        """
        self.seq += 1
        self.is_open = True
        steps = version - self.sent_at
        if steps:
            self.step_s = self.compute_s / steps
        self.compute_s, self.sent_at = 0.0, version
        update = replace(
            update,
            seq=self.seq,
            num_samples=self.samples,
            steps=steps,
            step_s=self.step_s,
            exchange_s=self.exchange_s,
            view=self.view,
        )
        self._sent_samples, self.samples = self.samples, 0
        self.request = SendUpdate(update, blocking)
        return self.request

    def answered(self, took_s: float, *, dropped: bool) -> None:
        """The open request was answered.

        Args:
            took_s: seconds that it was on its way.
            dropped: it was not taken in: its rows count with the next one.
        """
        if dropped:
            self.samples += self._sent_samples
        self.is_open, self.request = False, None
        self.exchange_s = max(0.0, took_s)

    def carried(self, update: Update) -> bool:
        """The open request goes on its way like this; whether it is that one."""
        if self.request is None or self.request.update.seq != update.seq:
            return False
        self.request = replace(self.request, update=update)
        return True

    def reopen(self, update: Update, *, blocking: bool) -> None:
        """A restored request is open again."""
        self.request, self.is_open = SendUpdate(update, blocking), True

    # -------------------------------------------------------------- checkpoints

    def export(self) -> dict[str, object]:
        """Plain values, but for the open request."""
        return {
            "seq": self.seq,
            "samples_since_send": self.samples,
            "sent_at": self.sent_at,
            "times_s": [self.compute_s, self.step_s, self.exchange_s],
            "sent_samples": self._sent_samples,
        } | ({"view": self.view} if self.view else {})

    def restore(self, data: Mapping[str, object], version: int) -> None:
        """Become what `export` saved, with no request open.

        Args:
            data: the plain values.
            version: steps applied.
        """
        self.seq = int(str(data["seq"]))
        self.samples = int(str(data["samples_since_send"]))
        self.sent_at = int(str(data.get("sent_at", version)))
        times_s = data.get("times_s")
        if isinstance(times_s, list):
            self.compute_s, self.step_s, self.exchange_s = map(float, times_s)
        self._sent_samples = int(str(data.get("sent_samples", 0)))
        self.view = int(str(data.get("view", 0)))

    def export_request(
        self, coded: Update | None
    ) -> tuple[dict[str, Tensor], dict[str, object] | None]:
        """The open request as tensors and plain values; ``coded``: as it goes on its way, if so."""
        if self.request is None:
            return {}, None
        tensors, rows = save_messages(_REQUEST, [coded or self.request.update])
        blocking, is_coded = self.request.blocking, coded is not None
        return tensors, {"blocking": blocking, "is_coded": is_coded, "update": rows}


def load_request(tensors: Mapping[str, Tensor], request: Mapping[str, object]) -> Update:
    """The update of a request that `RegionRequests.export_request` saved."""
    (update,) = load_messages(Update, tensors, request["update"])
    return update
