"""The lead's view of a follower: a `ShardPort` whose calls are requests over the LAN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.runtime.messages.exchange import as_bytes, as_tensor, contributions_meta, reply_meta
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.server.shard import Contribution
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.wire import fields


class RemoteShard:
    """See `geo_ray.training.server.region_model.ShardPort`.

    Args:
        client: connection to the follower.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, client: LanClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def apply(
        self, contributions: Sequence[Contribution], *, measure: bool = False
    ) -> float | None:
        """One step on the slice; the squared norm of its mean gradient if it is to be measured."""
        request = contributions_meta(contributions) | {"measure": measure}
        meta, _ = self._client.request(request, timeout_s=self._timeout_s)
        return fields.optional_number(meta, "mean_sq")

    def outgoing(self) -> Outgoing | Wait | None:
        """What the slice says after a step."""
        return self._said("speak")

    def finish(self) -> Outgoing | None:
        """The slice's last word."""
        out = self._said("finish")
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: Reply) -> None:
        """Merge the slice of an answer."""
        meta = reply_meta(reply) | {"op": "merge"}
        self._client.request(meta, as_bytes(reply.payload_P), timeout_s=self._timeout_s)

    def dropped(self) -> None:
        """Let the follower know that the last message gets no answer."""
        self._client.request({"op": "dropped"}, timeout_s=self._timeout_s)

    def snapshot(self, checkpoint: int) -> None:
        """Let the follower keep a copy of its present state."""
        self._client.request({"op": "snapshot", "id": checkpoint}, timeout_s=self._timeout_s)

    def params(self) -> Tensor:
        """A copy of the slice's parameters, fp32 (S,)."""
        _, payload = self._client.request({"op": "params"}, timeout_s=self._timeout_s)
        return as_tensor(payload)

    def _said(self, operation: str) -> Outgoing | Wait | None:
        meta, payload = self._client.request({"op": operation}, timeout_s=self._timeout_s)
        said = fields.text(meta, "said")
        if said == "outgoing":
            payload_S = torch.clone(as_tensor(payload))
            return Outgoing(payload_S, fields.flag(meta, "wait"), fields.count(meta, "fragment"))
        if said not in {"wait", "nothing"}:
            raise InvariantError(f"a follower said {said!r}")
        return Wait() if said == "wait" else None
