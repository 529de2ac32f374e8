"""An averager that goes on from a checkpoint, perhaps without regions that took part there.

Who is not there any more has left at the cut: nothing more is kept of it, and whoever waited for it
alone is answered. The others hear those answers as they repeat their open requests, so nothing of
what happens here has to be sent. What the region had said and nobody had taken into the model, and
what it had not said yet, is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from geo_ray.training.averager.averager import Averager
from geo_ray.training.membership.view import View


def resume(
    averager: Averager, tensors: Mapping[str, Tensor], control: Mapping[str, object]
) -> None:
    """Let an averager that has done nothing yet go on from a checkpoint.

    Args:
        averager: over the regions that are there now.
        tensors: of its part.
        control: plain values of its part.

    Raises:
        ConfigDriftError: it was saved with other codecs.
        CheckpointCorruptError: it cannot be read.
        GeoRayError: the strategy cannot go on without who is not there.
    """
    there, saved = averager.state.members, control.get("members")
    before = {str(name) for name in saved} if isinstance(saved, list) else set(there)
    gone = sorted(before.difference(there))
    if gone:
        averager.state.members = tuple(sorted({*there, *before}))
        averager.view = View(averager.state.members)
    averager.restore(tensors, control)
    if gone:
        averager.state.now_s = float(str(control.get("now_s", averager.state.now_s)))
        averager.go_on_in(averager.view.changed((), gone))
