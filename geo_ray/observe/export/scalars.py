"""The scalars that programs for experiments are given, from a run's events. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.counters import LinkTotals


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """One value of a scalar.

    Attributes:
        name: ``loss/us-east``.
        value: finite.
        step: of the region, or the highest of any.
        t_s: seconds of the run.
    """

    name: str
    value: float
    step: int
    t_s: float


class ScalarFold:
    """Folds events into scalars.

    Args:
        every_s: seconds of the run that lie between two values of one scalar at least; those of
            evaluations are all given.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._given_s: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._wan = LinkTotals()
        self._wan_bytes = 0

    def feed(self, event: Event) -> tuple[ScalarValue, ...]:
        """Take the next event; give the scalars that it has."""
        match event.kind:
            case "run_started":
                self._wan.restart()
                return ()
            case "step":
                region = event["region"]
                self._steps[region] = event["step"]
                busy_s = (event["compute_s"] or 0.0) + (event["wait_s"] or 0.0)
                values = {
                    f"loss/{region}": event["loss"],
                    f"wait_share/{region}": (event["wait_s"] or 0.0) / busy_s if busy_s else None,
                }
                return self._thinned(values, event["step"], event.t_s)
            case "exchange":
                region, start_s = event["region"], event["start_s"]
                values = {
                    f"exchange_s/{region}": None if start_s is None else event.t_s - start_s,
                    f"staleness/{region}": event["staleness"],
                }
                return self._thinned(values, self._steps.get(region, 0), event.t_s)
            case "wan":
                new = self._wan.feed(event["src"], event["dst"], event["bytes_by_class"])
                self._wan_bytes += sum(new.values())
                step = max(self._steps.values(), default=0)
                return self._thinned({"wan_bytes": float(self._wan_bytes)}, step, event.t_s)
            case "eval":
                whose = "" if event["region"] is None else f"/{event['region']}"
                values = {f"eval/{name}{whose}": v for name, v in event["metrics"].items()}
                return self._finite(values, event["step"], event.t_s)
            case _:
                return ()

    def _thinned(
        self, values: dict[str, float | None], step: int, t_s: float
    ) -> tuple[ScalarValue, ...]:
        due = {
            name: value
            for name, value in values.items()
            if t_s - self._given_s.get(name, -math.inf) >= self._every_s
        }
        self._given_s.update(dict.fromkeys(due, t_s))
        return self._finite(due, step, t_s)

    def _finite(
        self, values: dict[str, float | None], step: int, t_s: float
    ) -> tuple[ScalarValue, ...]:
        return tuple(
            ScalarValue(name, float(value), step, t_s)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        )
