"""Which links a run has, as a line for people: emulated, assumed, or those that there are."""

from __future__ import annotations

from collections.abc import Iterable

from geo_ray.config.experiment import Experiment
from geo_ray.transport.emulation.link_model import LinkSpec


def links_text(experiment: Experiment, *, simulated: bool) -> str:
    """What a run's links and steps are, for its header.

    Args:
        experiment: the run.
        simulated: whether it runs on a virtual clock.
    """
    parts = [_links(experiment, simulated=simulated), _steps(experiment, simulated=simulated)]
    return "; ".join(part for part in parts if part)


def _links(experiment: Experiment, *, simulated: bool) -> str:
    names = experiment.region_names
    if len(names) == 1:
        return "no links: one region"
    pairs = len(names) * (len(names) - 1)
    specs = list(experiment.links().values())
    if not specs:
        if simulated:
            return "links assumed without delay and limit: no `emulate` describes them"
        return "links as they are: nothing is emulated"
    word = "assumed" if simulated else "emulated"
    some = "" if len(specs) == pairs else f" in {len(specs)} of {pairs} directions"
    text = f"links {word}{some}: {_facts(specs)}"
    if not simulated and experiment.cluster.kind != "local":
        text += ", which slows the cluster's own links down"
    if len(specs) < pairs:
        text += "; the others without delay and limit" if simulated else "; the others as they are"
    return text


def _facts(specs: Iterable[LinkSpec]) -> str:
    chosen = list(specs)
    rates = [spec.rate_mbps for spec in chosen]
    limited = [rate for rate in rates if rate is not None]
    parts = ["no limit" if None in rates else "", _span(limited, 1.0, "Mbit/s")]
    parts.append(_span([spec.delay_s for spec in chosen], 1e3, "ms one way"))
    if any(spec.jitter_s for spec in chosen):
        parts.append(_span([spec.jitter_s for spec in chosen], 1e3, "ms jitter"))
    if any(spec.loss for spec in chosen):
        parts.append(_span([spec.loss for spec in chosen], 1e2, "% loss"))
    if any(spec.outages for spec in chosen):
        parts.append("with outages")
    return ", ".join(part for part in parts if part)


def _span(values: list[float], factor: float, unit: str) -> str:
    if not values:
        return ""
    low, high = min(values) * factor, max(values) * factor
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"


def _steps(experiment: Experiment, *, simulated: bool) -> str:
    paced = [experiment.step_s(name) for name in experiment.region_names]
    known = [step_s for step_s in paced if step_s is not None]
    if not known:
        return "steps as long as they take on this machine" if simulated else ""
    some = "" if len(known) == len(paced) else f" in {len(known)} of {len(paced)} regions"
    word = "take" if simulated else "padded to"
    return f"steps {word} {_span(known, 1.0, 's')}{some}"
