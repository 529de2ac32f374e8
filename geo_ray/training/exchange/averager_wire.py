"""The averager's end of the exchange: updates become vectors again, replies become small.

The mirror of `geo_ray.training.exchange.region_wire`. A strategy that works in rounds has one
answer for all regions: it is encoded once, from one residual and one reference, and every region
merges the same bits. Other regions have a reference each, and a residual if one is due.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from geo_ray.codecs.base import wrong
from geo_ray.codecs.common.feedback import Encoder, all_finite, open_coded
from geo_ray.errors import InvariantError, NonFiniteError, ReferenceLostError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.compute.flat import fragment_cuts
from geo_ray.training.exchange.wire_plan import WirePlan

_ALL = "*"  # in place of a region's name: the one answer of a round
_REFERENCE = "reference/"
_ENCODER = "encoder/"


@dataclass(slots=True)
class AveragerWire:
    """See the module's docstring.

    Attributes:
        plan: the codecs.
    """

    plan: WirePlan = field(default_factory=WirePlan)
    _encoders: dict[str, Encoder] = field(default_factory=dict)
    _references: dict[str, Tensor] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _merged: dict[str, int] = field(default_factory=dict)
    _in_full: set[str] = field(default_factory=set)  # who said its last word last

    def decode(self, update: Update, num_params: int) -> Update:
        """The update with its payload as a vector; notes which reply its sender has merged.

        Args:
            update: as it came; one that is no repetition.
            num_params: P.

        Raises:
            FrameError: if the coded payload makes no sense.
            ReferenceLostError: if it is a difference from something that is not here.
        """
        if update.coded is not None:
            cuts = fragment_cuts(num_params, self.plan.fragments)
            if update.fragment >= len(cuts):
                raise wrong(update.coded.kind, f"there is no fragment {update.fragment}")
            start, stop = cuts[update.fragment]
            payload_P = open_coded(self.plan.up, update.coded, stop - start)
            if update.against is not None:
                payload_P = self._reference(update, update.against) + payload_P
            update = replace(update, payload_P=payload_P, coded=None, against=None)
        self._merged[update.region] = update.base_version
        if update.final:
            self._in_full.add(update.region)
        else:
            self._in_full.discard(update.region)
        return update

    def encode(self, replies: Sequence[Reply]) -> list[Reply]:
        """Answers as they go on their way; once per answer, in their order."""
        if not replies or not (self.plan.down or self.plan.keeps_reference):
            return list(replies)
        if self.plan.in_rounds:
            return self._encode(_ALL, replies)
        return [coded for reply in replies for coded in self._encode(reply.to, [reply])]

    def join(self, region: str, giver: str) -> None:
        """A region begins as a copy of another one, which is owed nothing at a border."""
        if giver in self._merged:
            self._merged[region] = self._merged[giver]
        if giver in self._references:  # in rounds it is everybody's
            self._references[region] = self._references[giver]
            self._versions[region] = self._versions[giver]

    def leave(self, region: str) -> None:
        """A region takes part no more."""
        self._merged.pop(region, None)
        self._references.pop(region, None)
        self._versions.pop(region, None)
        self._in_full.discard(region)
        own = [key for key in self._encoders if key.partition("#")[0] == region]
        for key in own:
            del self._encoders[key]

    def _owed_by_fragments(self, key: str, payload_P: Tensor) -> Tensor:
        """The whole model's answer with what is owed of its fragments."""
        whole_P = payload_P.clone()
        cuts = fragment_cuts(payload_P.numel(), self.plan.fragments)[:-1]
        for i, (start, stop) in enumerate(cuts):
            whole_P[start:stop] = self._encoder(f"{key}#{i}").in_full(whole_P[start:stop])
        return whole_P

    def export(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Tensors and plain values for a checkpoint."""
        tensors = {_REFERENCE + key: value.clone() for key, value in self._references.items()}
        for key, encoder in self._encoders.items():
            tensors |= {f"{_ENCODER}{key}/{k}": v for k, v in encoder.export().items()}
        return tensors, {
            "codecs": self.plan.export(),
            "versions": dict(self._versions),
            "merged": dict(self._merged),
            "in_full": sorted(self._in_full),
        }

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Become what `export` saved.

        Raises:
            ConfigDriftError: if it was saved with other codecs.
        """
        self.plan.check(control.get("codecs"))
        versions, merged = control.get("versions", {}), control.get("merged", {})
        self._versions = dict(versions) if isinstance(versions, Mapping) else {}
        self._merged = dict(merged) if isinstance(merged, Mapping) else {}
        in_full = control.get("in_full", ())
        self._in_full = set(in_full) if isinstance(in_full, list) else set()
        self._references, self._encoders = {}, {}
        saved: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, key, *rest = name.split("/", 2)
            if f"{kind}/" == _REFERENCE:
                self._references[key] = value.clone()
            else:
                saved.setdefault(key, {})["/".join(rest)] = value
        for key, state in saved.items():
            self._encoder(key).restore(state)

    def _key(self, region: str) -> str:
        return _ALL if self.plan.in_rounds else region

    def _encoder(self, key: str) -> Encoder:
        found = self._encoders.get(key)
        if found is None:
            found = Encoder(self.plan.down, f"{self.plan.seed}/down/{key}")
            self._encoders[key] = found
        return found

    def _reference(self, update: Update, against: int) -> Tensor:
        key = self._key(update.region)
        if key not in self._references or self._versions.get(key) != against:
            raise ReferenceLostError(
                f"update {update.seq} of region '{update.region}' is a difference from version "
                f"{against}; the averager remembers {self._versions.get(key)}"
            )
        return self._references[key]

    def _encode(self, key: str, replies: Sequence[Reply]) -> list[Reply]:
        """Several answers with one payload."""
        plan, first = self.plan, replies[0]
        whole = plan.fragments > 1 and first.fragment == plan.fragments
        if plan.fragments > 1:
            if whole:
                first = replace(first, payload_P=self._owed_by_fragments(key, first.payload_P))
            key = f"{key}#{first.fragment}"
        encoder = self._encoder(key)
        if not plan.owes_replies or (plan.in_rounds and first.num_samples == 0):
            # Nothing is owed, or it must not be lost with an answer that regions may ignore.
            encoder = replace(encoder, residual_P=None)
        known = all(self._merged.get(reply.to) == self._versions.get(key) for reply in replies)
        reference_P = self._references.get(key) if known and plan.differs(plan.down) else None
        gap = plan.differs(plan.down) and reference_P is None
        # A last word may be answered as an ordinary one, for a checkpoint: also that as a last one.
        final = any(reply.to in self._in_full for reply in replies)
        coded, against = None, None
        last = (final or whole) and plan.is_lossy(plan.down)
        if gap or (last and plan.last_reply_error == 0.0):
            payload_P = encoder.in_full(first.payload_P)
        else:
            change_P = first.payload_P if reference_P is None else first.payload_P - reference_P
            if last:
                encoded = encoder.last(change_P, first.version, plan.last_reply_error)
            else:
                encoded = encoder.encode(change_P, first.version)
            coded = encoded.coded
            payload_P = encoded.sent_P if reference_P is None else reference_P + encoded.sent_P
            against = None if coded is None or reference_P is None else self._versions[key]
        if plan.keeps_reference:
            self._references[key], self._versions[key] = payload_P, first.version
        sent_P = payload_P if coded is None else torch.empty(0)
        return [replace(r, payload_P=sent_P, coded=coded, against=against) for r in replies]


def check_payload(
    vector_P: Tensor, fragments: Sequence[tuple[int, int]], what: str, fragment: int = 0
) -> None:
    """Refuse what no strategy may take in.

    Args:
        vector_P: decoded.
        fragments: where those of the model lie, see `fragment_cuts`.
        what: of whom it is, in words.
        fragment: which one it is about.

    Raises:
        InvariantError: there is no such fragment, or it has another size.
        NonFiniteError: it has NaN or infinity.
    """
    if fragment >= len(fragments):
        raise InvariantError(f"{what} is about fragment {fragment} of {len(fragments)}")
    start, stop = fragments[fragment]
    if vector_P.shape != (stop - start,):
        raise InvariantError(
            f"{what} has {tuple(vector_P.shape)} parameters, not {stop - start} of the model's "
            f"{fragments[-1][1]}"
        )
    if not all_finite(vector_P):
        raise NonFiniteError(f"{what} is not finite; refused")
