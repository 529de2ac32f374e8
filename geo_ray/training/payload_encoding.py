"""Encoding and decoding of payloads at both ends of an exchange.

A change is encoded directly. A model is encoded as its difference from a reference: the payload of
the last reply that the region merged, which the averager knows to the bit. Each update names the
version of its reference. If it is not the newest that the averager remembers, the averager replies
in full; if the averager does not know it (`REFERENCE_LOST`), the region resends in full. The first
message is sent in full, and the last one contains all residuals. Lossless codecs encode the model
itself. By message:

- updates that are changes or gradients: the change; one residual per region
- updates that are models (`ama`, `sma`): the model minus the reference; one residual per region
- replies in rounds: the change of the global model (`bsp`: the mean gradient), once for all
  regions; one residual
- replies of `sma`: the mean minus the reference, once for all regions; one residual
- replies to one region (`asgd` and others without common rounds): the change for this region; one
  residual per region
- replies of `ama`: the mean minus this region's reference; no residual, because the next difference
  contains the loss

If regions end by a total of rows, the averager announces the final round with the reply before it.
If the rows of that round differ from the expectation, another round follows, or its residual is
lost. A target ends such a run one round later.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch
from torch import Tensor

from geo_ray.base.errors import (
    ConfigChangedError,
    InvariantError,
    NonFiniteError,
    ReferenceLostError,
)
from geo_ray.codecs.base import Codec, Coded, wrong
from geo_ray.codecs.feedback import Encoder, all_finite, open_coded
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import CodecConfig
from geo_ray.strategies.traits import Sends
from geo_ray.training.lossy_blocks import LossySender
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.parameters import fragment_bounds


@dataclass(frozen=True, slots=True)
class WirePlan:
    """Codecs of a run, and the strategy's properties that they depend on.

    Attributes:
        up: codec of updates; None: no encoding.
        down: codec of replies; None: no encoding.
        sends: kind of the strategy's payloads.
        in_rounds: whether a round has one answer for all regions.
        seed: run's seed.
        fragments: number of the model's parts, each with its own stream.
        last_error: largest relative error of the last exchange; 0: it is sent in full.
        bounds: positions of the parts, and of the whole, in a vector that is only a slice of the
            model; empty: it is the model.
    """

    up: Codec | None = None
    down: Codec | None = None
    sends: Sends = "change"
    in_rounds: bool = False
    seed: int = 0
    fragments: int = 1
    last_error: float = 0.0
    bounds: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, strategy: Strategy, codec: CodecConfig, seed: int) -> Self:
        """Return how the payloads of a strategy are encoded."""
        traits = strategy.traits
        return cls(
            codec.up,
            codec.down,
            traits.sends,
            traits.in_rounds,
            seed,
            traits.exchange.fragments,
            codec.last_error_of(strategy),
        )

    def bounds_of(self, num_params: int) -> list[tuple[int, int]]:
        """Return the positions of the parts in a vector; see `fragment_bounds`."""
        return list(self.bounds) or fragment_bounds(num_params, self.fragments)

    @property
    def keeps_reference(self) -> bool:
        """Whether both ends store the last reply's payload, to send differences from it."""
        return self.differs(self.up) or self.differs(self.down)

    def differs(self, codec: Codec | None) -> bool:
        """Tell whether ``codec`` encodes differences from the reference.

        A lossless codec encodes the payload itself, since a difference would be rounded.
        """
        return self.sends == "model" and self.is_lossy(codec)

    @property
    def owes_replies(self) -> bool:
        """Whether a reply's loss must be added to the next reply.

        A mean of the regions' models is based on what they hold, so a loss is missing from it. A
        model that the averager makes from its own state (`ama`) still contains it: the difference
        from the reference has it, and it would count twice.
        """
        return self.sends == "change" or self.in_rounds

    @property
    def last_reply_error(self) -> float:
        """As `last_error`, for answers; 0 where each region gets its own encoding.

        All regions must be equal to the bit, which then needs full precision.
        """
        return self.last_error if self.sends == "change" or self.in_rounds else 0.0

    @property
    def owes(self) -> bool:
        """Whether coding errors may remain after the last round, unless it is the final update."""
        codecs = [codec for codec in (self.up, self.down) if codec is not None]
        return any(codec.traits.lossy and not codec.traits.feeds_back for codec in codecs)

    @staticmethod
    def is_lossy(codec: Codec | None) -> bool:
        """Tell whether ``codec`` changes any bits."""
        return codec is not None and codec.traits.lossy

    def export(self) -> dict[str, object]:
        """The codecs as plain values, for a checkpoint."""
        return {"up": _name(self.up), "down": _name(self.down)}

    def check(self, saved: object) -> None:
        """Refuse state of other codecs.

        Args:
            saved: result of `export`; None for a checkpoint without codecs.

        Raises:
            ConfigChangedError: the saved codecs differ from the present ones.
        """
        found = saved if isinstance(saved, Mapping) else {"up": "none", "down": "none"}
        for direction, wanted in self.export().items():
            if found.get(direction) != wanted:
                raise ConfigChangedError(
                    f"codec.{direction} is {wanted}, the checkpoint was made with "
                    f"{found.get(direction)}; what it owes to other regions cannot be taken over",
                    fix="Resume with the codecs of the checkpoint, or begin a new run.",
                )


def _name(codec: Codec | None) -> str:
    return "none" if codec is None else repr(codec)


REFERENCE: Final = "reference"
"""Name of the newest answer among a region's tensors: the reference of later messages."""

_OWED_BEFORE = "owed_before"
_PART = "fragment/"
_LOSSY = "lossy/"


@dataclass(slots=True)
class RegionWire:
    """A region's end of the exchange: updates become small, replies become vectors again.

    A strategy that sends changes has them coded as they are. One that sends its model has the
    difference from its *reference* coded: the payload of the last reply that this region merged,
    which the averager knows to the bit. The first message is sent in full: it has no reference. The
    last one contains all that is owed, to the configured error, so that regions end equal.

    Shape legend: P = parameters of the model.

    Attributes:
        plan: the codecs.
        region: whose end this is.
        num_params: P.
    """

    plan: WirePlan = field(default_factory=WirePlan)
    region: str = ""
    num_params: int = 0
    _bounds: list[tuple[int, int]] = field(init=False)
    _encoder: Encoder = field(init=False)
    _parts: list[Encoder] = field(
        default_factory=list
    )  # encoders of fragments, if there are several
    _reference_P: Tensor | None = None
    _version: int = 0
    _open: UpdateMessage | None = None
    _owed_before_P: Tensor | None = None
    _lossy: LossySender | None = None

    def __post_init__(self) -> None:
        stream = f"{self.plan.seed}/up/{self.region}"
        self._encoder = Encoder(self.plan.up, stream)
        self._bounds = self.plan.bounds_of(self.num_params)
        if len(self._bounds) > 1:
            self._parts = [Encoder(self.plan.up, f"{stream}/{i}") for i in range(len(self._bounds))]
        differential = None if self.plan.up is None else self.plan.up.traits.differential
        if differential is not None:
            self._lossy = LossySender(differential)

    def encode(self, update: UpdateMessage) -> UpdateMessage:
        """Encode updates, in order.

        An update that was already encoded before a resume is unchanged.
        """
        known = self._open
        if known is not None and (known.attempt, known.seq) == (update.attempt, update.seq):
            return known
        plan, payload_P = self.plan, update.payload_P
        encoder = self._encoder_of(update.fragment)
        if self._lossy is not None:
            self._before(update, self._lossy)
        if plan.sends == "model" and not plan.in_rounds:
            owed_P = encoder.residual_P
            self._owed_before_P = None if owed_P is None else owed_P.clone()
        if plan.in_rounds and update.num_samples == 0:
            # Its weight in the round is 0, so what is owed must not be sent with it.
            encoder = replace(encoder, residual_P=None)
        reference_P = self._reference_P if plan.differs(plan.up) else None
        last = update.final and plan.is_lossy(plan.up)
        if last:
            payload_P = self._owed_of_parts(payload_P)
        first = plan.differs(plan.up) and reference_P is None
        # A codec that loses blocks in flight has all of its bytes to send anyway.
        in_full = plan.last_error == 0.0 or self._lossy is not None
        if first or (last and in_full):
            self._open = replace(update, payload_P=encoder.in_full(payload_P))
            return self._open
        against = None if reference_P is None else self._version
        if reference_P is not None:
            payload_P = payload_P - reference_P.to(payload_P.device)
        if last:
            encoded = encoder.last(payload_P, update.seq, plan.last_error)
        else:
            encoded = encoder.encode(payload_P, update.seq)
        if self._lossy is not None:
            self._lossy.sent(update.seq, encoded.coded)
        if encoded.coded is None:
            whole_P = self._whole(encoded.sent_P, against)
            self._open = replace(update, payload_P=whole_P)
        else:
            nothing = torch.empty(0)
            self._open = replace(update, payload_P=nothing, coded=encoded.coded, against=against)
        return self._open

    def in_full(self, update: UpdateMessage) -> UpdateMessage:
        """Return the update unencoded, for an averager that has lost the reference."""
        if update.coded is None:
            return update
        vector_P = open_coded(self.plan.up, update.coded, self.num_of(update.fragment))
        whole_P = self._whole(vector_P, update.against)
        self._open = replace(update, payload_P=whole_P, coded=None, against=None)
        return self._open

    def decode(self, reply: ReplyMessage) -> ReplyMessage:
        """Decode a reply, whose payload becomes the reference.

        If the update was dropped, its content is first added to what is owed.

        Raises:
            FrameError: the encoded payload is invalid.
            InvariantError: the reference is missing, or the dropped update is not the open one.
        """
        if reply.dropped:
            self.dropped(reply.seq)
        payload_P = reply.payload_P
        if reply.coded is not None:
            vector_P = open_coded(self.plan.down, reply.coded, self.num_of(reply.fragment))
            payload_P = self._whole(vector_P, reply.against)
            reply = replace(reply, payload_P=payload_P, coded=None, against=None)
        if self.plan.keeps_reference:
            self._reference_P, self._version = payload_P, reply.version
        if self._lossy is not None:
            self._put_back_all(self._lossy.settle(reply.seq, reply.lossy))
            if reply.reliable is not None:
                self._lossy.codec.set_reliable_fraction(self._encoder.memory, reply.reliable)
        self._open = self._owed_before_P = None
        return reply

    @property
    def open_update(self) -> UpdateMessage | None:
        """Encoded form of the open request; None without one."""
        return self._open

    def forget_sent(self) -> None:
        """Free the payload of the open request, which is not sent again."""
        if self._open is not None:
            self._open = replace(self._open, payload_P=torch.empty(0), coded=None)

    def reopen(self, update: UpdateMessage) -> None:
        """Restore an encoded request as the open one."""
        self._open = update

    def flowing(self) -> int | None:
        """Newest update whose lossy blocks may still be in flight; None if there is none."""
        return None if self._lossy is None else self._lossy.newest()

    def unsent(self, seq: int, first_rank: int) -> None:
        """Loose blocks of update ``seq`` from ``first_rank`` on never left: they are owed again."""
        if self._lossy is not None:
            self._put_back_all(self._lossy.unsent(seq, first_rank))

    def dropped(self, seq: int) -> UpdateMessage:
        """Take back the open update, which was discarded: its content is owed again.

        Returns:
            The update.

        Raises:
            InvariantError: another update is open, or a round needs it.
        """
        update = self._open
        if update is None or update.seq != seq:
            raise InvariantError(f"update {seq} of '{self.region}' was dropped, but is not open")
        if self.plan.in_rounds:
            raise InvariantError(f"update {seq} of '{self.region}' was dropped from a round")
        if self._lossy is not None:
            self._lossy.forget(seq)
        if self.plan.sends == "model":  # the model itself is sent again, debts are as before
            self._encoder.residual_P = self._owed_before_P
        elif update.coded is None:
            self._encoder_of(update.fragment).put_back(update.payload_P)
        else:
            self.put_back(update.coded, update.fragment)
        self._open = self._owed_before_P = None
        return update

    def put_back(self, coded: Coded, fragment: int = 0) -> None:
        """Add the content of ``coded``, or of a part of it, to what is owed.

        Raises:
            FrameError: ``coded`` is invalid.
        """
        vector_P = open_coded(self.plan.up, coded, self.num_of(fragment))
        self._encoder_of(fragment).put_back(vector_P)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies for a checkpoint."""
        found = self._encoder.export()
        if self._lossy is not None:
            found |= {_LOSSY + name: value for name, value in self._lossy.export()[0].items()}
        if self._owed_before_P is not None:
            found[_OWED_BEFORE] = self._owed_before_P.clone()
        for i, part_encoder in enumerate(self._parts):
            found |= {f"{_PART}{i}/{k}": v for k, v in part_encoder.export().items()}
        if self._reference_P is not None:
            found[REFERENCE] = self._reference_P.clone()
        return found

    def export(self) -> dict[str, object]:
        """Return plain values for a checkpoint."""
        books = [] if self._lossy is None else self._lossy.export()[1]
        return {"codecs": self.plan.export(), "version": self._version, "lossy": books}

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Restore the results of `tensors` and `export`.

        Raises:
            ConfigChangedError: the state was saved with other codecs.
        """
        self.plan.check(control.get("codecs"))
        self._encoder.restore(tensors)
        for i, encoder in enumerate(self._parts):
            prefix = f"{_PART}{i}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            encoder.restore(own)
        reference_P = tensors.get(REFERENCE)
        self._reference_P = None if reference_P is None else reference_P.clone()
        self._version = int(str(control.get("version", 0)))
        self._open, self._owed_before_P = None, tensors.get(_OWED_BEFORE)
        if self._lossy is not None:
            prefixed = {k: v for k, v in tensors.items() if k.startswith(_LOSSY)}
            own = {k.removeprefix(_LOSSY): v for k, v in prefixed.items()}
            self._lossy.restore(own, control.get("lossy"))

    def _owed_of_parts(self, payload_P: Tensor) -> Tensor:
        """Return the whole model's last payload plus what its fragments owe."""
        if not self._parts:
            return payload_P
        whole_P = payload_P.clone()
        for part, (start, stop) in zip(self._parts[:-1], self._bounds, strict=False):
            whole_P[start:stop] = part.in_full(whole_P[start:stop])
        return whole_P

    def _encoder_of(self, fragment: int) -> Encoder:
        return self._parts[fragment] if self._parts else self._encoder

    def num_of(self, fragment: int) -> int:
        """Return the number of parameters in a fragment; without fragments, of the model."""
        start, stop = self._bounds[fragment]
        return stop - start

    def _whole(self, vector_P: Tensor, against: int | None) -> Tensor:
        if against is None:
            return vector_P
        if self._reference_P is None or against != self._version:
            raise InvariantError(
                f"region '{self.region}' has version {self._version} as reference, not {against}"
            )
        return self._reference_P.to(vector_P.device) + vector_P

    def _before(self, update: UpdateMessage, lossy: LossySender) -> None:
        """Return what differential transmission needs before it encodes an update."""
        if update.loss is not None:
            lossy.codec.observe(self._encoder.memory, update.loss)
        if update.final:  # the averager forgets lossy blocks with it
            self._put_back_all(lossy.take_all())

    def _put_back_all(self, parts: Sequence[Coded]) -> None:
        for part in parts:
            self.put_back(part)


_ALL = "*"  # in place of a region's name: the one answer of a round
_REFERENCE = "reference/"
_ENCODER = "encoder/"


@dataclass(slots=True)
class AveragerWire:
    """The averager's end of the exchange: updates become vectors again, replies become small.

    The mirror of `geo_ray.training.payload_encoding`. A strategy that works in rounds has one
    answer for all regions: it is encoded once, from one residual and one reference, and every
    region merges the same bits. Other regions have a reference each, and a residual if one is due.

    Shape legend: P = parameters of the model.

    Attributes:
        plan: the codecs.
    """

    plan: WirePlan = field(default_factory=WirePlan)
    _encoders: dict[str, Encoder] = field(default_factory=dict)
    _references: dict[str, Tensor] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _merged: dict[str, int] = field(default_factory=dict)
    _in_full: set[str] = field(default_factory=set)  # regions whose last update was a final one

    def decode(self, update: UpdateMessage, num_params: int) -> UpdateMessage:
        """The update with its payload as a vector; notes which reply its sender has merged.

        Args:
            update: as it came; one that is no repetition.
            num_params: P.

        Raises:
            FrameError: if the coded payload makes no sense.
            ReferenceLostError: if it is a difference from something that is not here.
        """
        update = self.opened(update, num_params)
        self._merged[update.region] = update.base_version
        if update.final:
            self._in_full.add(update.region)
        else:
            self._in_full.discard(update.region)
        return update

    def opened(self, update: UpdateMessage, num_params: int) -> UpdateMessage:
        """Return the update with its payload as a vector; nothing changes.

        Arguments and errors are those of `decode`.
        """
        if update.coded is not None:
            bounds = self.plan.bounds_of(num_params)
            if update.fragment >= len(bounds):
                raise wrong(update.coded.kind, f"unknown fragment {update.fragment}")
            start, stop = bounds[update.fragment]
            payload_P = open_coded(self.plan.up, update.coded, stop - start)
            if update.against is not None:
                payload_P = self._reference(update, update.against) + payload_P
            update = replace(update, payload_P=payload_P, coded=None, against=None)
        return update

    def encode(self, replies: Sequence[ReplyMessage]) -> list[ReplyMessage]:
        """Encode answers, in order; each only once."""
        if not replies or not (self.plan.down or self.plan.keeps_reference):
            return list(replies)
        if self.plan.in_rounds:
            return self._encode(_ALL, replies)
        return [coded for reply in replies for coded in self._encode(reply.to, [reply])]

    def join(self, region: str, donor: str) -> None:
        """Register a joining region as a copy of its donor; nothing is owed at a barrier."""
        if donor in self._merged:
            self._merged[region] = self._merged[donor]
        if donor in self._references:  # in rounds all regions share it
            self._references[region] = self._references[donor]
            self._versions[region] = self._versions[donor]

    def leave(self, region: str) -> None:
        """Remove a region."""
        self._merged.pop(region, None)
        self._references.pop(region, None)
        self._versions.pop(region, None)
        self._in_full.discard(region)
        own = [key for key in self._encoders if key.partition("#")[0] == region]
        for key in own:
            del self._encoders[key]

    def _owed_by_fragments(self, key: str, payload_P: Tensor) -> Tensor:
        """Return the whole model's answer plus what its fragments owe."""
        whole_P = payload_P.clone()
        bounds = self.plan.bounds_of(payload_P.numel())[:-1]
        for i, (start, stop) in enumerate(bounds):
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
        """Restore the result of `export`.

        Raises:
            ConfigChangedError: the state was saved with other codecs.
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

    def _reference(self, update: UpdateMessage, against: int) -> Tensor:
        key = self._key(update.region)
        if key not in self._references or self._versions.get(key) != against:
            raise ReferenceLostError(
                f"update {update.seq} of region '{update.region}' is a difference from version "
                f"{against}; the averager remembers {self._versions.get(key)}"
            )
        return self._references[key]

    def _encode(self, key: str, replies: Sequence[ReplyMessage]) -> list[ReplyMessage]:
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
        # A final update may be answered as an ordinary one, for a checkpoint, and again as a final
        # one.
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
    """Refuse payloads that no strategy may take in.

    Args:
        vector_P: decoded payload.
        fragments: positions of the model's fragments, see `fragment_bounds`.
        what: description of the message, for errors.
        fragment: fragment of the payload.

    Raises:
        InvariantError: the fragment does not exist, or has another size.
        NonFiniteError: the payload has NaN or infinity.
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
