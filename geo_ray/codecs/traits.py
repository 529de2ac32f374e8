"""What a codec says of itself, in one record that it must give: `Codec.traits`.

As with strategies: whatever depends on which codec a run has reads it here, so a codec that is not
part of this library has the same rights as one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from geo_ray.codecs.differential import DifferentialCodec

Sends = Literal["change", "model"]
"""What a strategy's payloads are; codecs make differences of models small, and changes as they
are."""

FP32_BITS: Final = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraits:
    """See the module's docstring.

    Attributes:
        lossy: whether decoding does not give back the very bits.
        bits_per_value: about what a value takes on the wire, as configured: of a long vector of
            normal values, or of a million where it depends on the length.
        sends: payloads that it goes with.
        rounds_only: whether all regions must apply what is sent at the same time.
        feeds_back: whether nothing is owed for what an encoding lost: the codec keeps it in its own
            memory, or needs no feedback. If not, the sender adds it to the next vector.
        forgets: whether what gets lost on the way is lost for good.
        up_only: whether it is for updates only.
        suits_answers: whether a codec that is given for both ways is taken for answers, too.
        expected_loss: relative loss of training that it is expected to cost with error feedback;
            None: not known, so that the planner does not propose it.
        differential: the codec itself, if parts of what it encodes may get lost on the way.
        with_shapes: the same codec, told the shapes of the model's tensors in the order of the
            vector; raises ValueError if they are not those that it was told before. None: it has
            no use for them.
    """

    lossy: bool
    bits_per_value: float
    sends: tuple[Sends, ...] = ("change", "model")
    rounds_only: bool = False
    feeds_back: bool = False
    forgets: bool = False
    up_only: bool = False
    suits_answers: bool = True
    expected_loss: float | None = None
    differential: DifferentialCodec | None = None
    # A codec of the same class; naming `Codec` here would make a circle of imports.
    with_shapes: Callable[[Sequence[tuple[int, ...]]], Any] | None = None
