"""A region's end of the exchange: updates become small, replies become vectors again.

A strategy that sends changes has them coded as they are. One that sends its model has the
difference from its *reference* coded: the payload of the last reply that this region merged, which
the averager knows to the bit. The first message goes in full: it has no reference. The last one
pays all that is owed, as exactly as is wanted, so that regions end equal.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded
from geo_ray.codecs.common.feedback import Encoder, open_coded
from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.compute.flat import fragment_cuts
from geo_ray.training.exchange.lossy_sender import LossySender
from geo_ray.training.exchange.wire_plan import WirePlan

REFERENCE: Final = "reference"
"""The newest answer, among a region's tensors: what later messages are differences from."""

_OWED_BEFORE = "owed_before"
_PART = "fragment/"
_LOSSY = "lossy/"


@dataclass(slots=True)
class RegionWire:
    """See the module's docstring.

    Attributes:
        plan: the codecs.
        region: whose end this is.
        num_params: P.
    """

    plan: WirePlan = field(default_factory=WirePlan)
    region: str = ""
    num_params: int = 0
    _cuts: list[tuple[int, int]] = field(init=False)
    _encoder: Encoder = field(init=False)
    _parts: list[Encoder] = field(default_factory=list)  # of fragments, if there are several
    _reference_P: Tensor | None = None
    _version: int = 0
    _open: Update | None = None
    _owed_before_P: Tensor | None = None
    _lossy: LossySender | None = None

    def __post_init__(self) -> None:
        stream = f"{self.plan.seed}/up/{self.region}"
        self._encoder = Encoder(self.plan.up, stream)
        self._cuts = fragment_cuts(self.num_params, self.plan.fragments)
        if len(self._cuts) > 1:
            self._parts = [Encoder(self.plan.up, f"{stream}/{i}") for i in range(len(self._cuts))]
        differential = None if self.plan.up is None else self.plan.up.traits.differential
        if differential is not None:
            self._lossy = LossySender(differential)

    def encode(self, update: Update) -> Update:
        """The update as it goes on its way; in their order.

        One that is open already, after a resume, stays as it was coded.
        """
        known = self._open
        if known is not None and (known.epoch, known.seq) == (update.epoch, update.seq):
            return known
        plan, payload_P = self.plan, update.payload_P
        encoder = self._encoder_of(update.fragment)
        if self._lossy is not None:
            self._before(update, self._lossy)
        if plan.sends == "model" and not plan.in_rounds:
            owed_P = encoder.residual_P
            self._owed_before_P = None if owed_P is None else owed_P.clone()
        if plan.in_rounds and update.num_samples == 0:
            # It has no weight in the round: what is owed must not be lost with it.
            encoder = replace(encoder, residual_P=None)
        reference_P = self._reference_P if plan.differs(plan.up) else None
        last = update.final and plan.is_lossy(plan.up)
        if last:
            payload_P = self._owed_of_parts(payload_P)
        first = plan.differs(plan.up) and reference_P is None
        # What is made to lose blocks on the way has all of its bytes to send anyway.
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

    def in_full(self, update: Update) -> Update:
        """The same update without its coding, for an averager that has lost the reference."""
        if update.coded is None:
            return update
        vector_P = open_coded(self.plan.up, update.coded, self.num_of(update.fragment))
        whole_P = self._whole(vector_P, update.against)
        self._open = replace(update, payload_P=whole_P, coded=None, against=None)
        return self._open

    def decode(self, reply: Reply) -> Reply:
        """The reply with its payload as a vector; from now on that is the reference.

        If it says that the update was dropped, that is owed again first.

        Raises:
            FrameError: if the coded payload makes no sense.
            InvariantError: if it is a difference from something that is not here, or if another
                update is open than one that was dropped.
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
                self._lossy.codec.tell_share(self._encoder.memory, reply.reliable)
        self._open = self._owed_before_P = None
        return reply

    @property
    def open_update(self) -> Update | None:
        """The open request as it goes on its way; None if there is none that was coded."""
        return self._open

    def reopen(self, update: Update) -> None:
        """Take a restored request, as it was coded, for the open one."""
        self._open = update

    def flowing(self) -> int | None:
        """The newest update whose lossy blocks may still be on their way; None if there is none."""
        return None if self._lossy is None else self._lossy.newest()

    def unsent(self, seq: int, first_rank: int) -> None:
        """Loose blocks of update ``seq`` from ``first_rank`` on never left: they are owed again."""
        if self._lossy is not None:
            self._put_back_all(self._lossy.unsent(seq, first_rank))

    def dropped(self, seq: int) -> Update:
        """Take back the open update, which nobody took in: its content is owed again.

        Returns:
            The update.

        Raises:
            InvariantError: if another one is open, or a round needs it.
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
        """Owe again what ``coded``, or a part of what was coded, stands for.

        Raises:
            FrameError: if it makes no sense.
        """
        vector_P = open_coded(self.plan.up, coded, self.num_of(fragment))
        self._encoder_of(fragment).put_back(vector_P)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint needs."""
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
        """Plain values that a checkpoint needs."""
        books = [] if self._lossy is None else self._lossy.export()[1]
        return {"codecs": self.plan.export(), "version": self._version, "lossy": books}

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Become what `tensors` and `export` saved.

        Raises:
            ConfigDriftError: if it was saved with other codecs.
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
        """The whole model's last payload with what is owed of its fragments."""
        if not self._parts:
            return payload_P
        whole_P = payload_P.clone()
        for part, (start, stop) in zip(self._parts[:-1], self._cuts, strict=False):
            whole_P[start:stop] = part.in_full(whole_P[start:stop])
        return whole_P

    def _encoder_of(self, fragment: int) -> Encoder:
        return self._parts[fragment] if self._parts else self._encoder

    def num_of(self, fragment: int) -> int:
        """Parameters in a fragment of the model, which is all of it where there are no others."""
        start, stop = self._cuts[fragment]
        return stop - start

    def _whole(self, vector_P: Tensor, against: int | None) -> Tensor:
        if against is None:
            return vector_P
        if self._reference_P is None or against != self._version:
            raise InvariantError(
                f"region '{self.region}' has version {self._version} as reference, not {against}"
            )
        return self._reference_P.to(vector_P.device) + vector_P

    def _before(self, update: Update, lossy: LossySender) -> None:
        """What differential transmission needs to know before it codes an update."""
        if update.loss is not None:
            lossy.codec.observe(self._encoder.memory, update.loss)
        if update.final:  # the averager forgets lossy blocks with it
            self._put_back_all(lossy.take_all())

    def _put_back_all(self, parts: Sequence[Coded]) -> None:
        for part in parts:
            self.put_back(part)
