"""The newest gradient noise of a run, from its `noise` events."""

from __future__ import annotations

from collections.abc import Mapping

from geo_ray.observe.events.schema import Event


def newest_noise(events: Mapping[str | None, Event]) -> dict[str, float | None] | None:
    """|G|^2, tr(Sigma) and B_simple; None if nothing was measured.

    All regions together if they were measured, else the mean of what each region measured by
    itself, weighted by the rows of its step: of both values first, only then divided.

    Args:
        events: the newest by region; None is all together.
    """
    chosen = [events[None]] if None in events else list(events.values())
    rows = sum(event["rows"] for event in chosen)
    if not rows:
        return None
    grad_sq, trace = (
        sum(event["rows"] * event.number(name) for event in chosen) / rows
        for name in ("grad_sq", "trace")
    )
    b_simple = max(0.0, trace) / grad_sq if grad_sq > 0 else None
    return {"grad_sq": grad_sq, "trace": trace, "b_simple": b_simple}
