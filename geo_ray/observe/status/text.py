"""The status of a run in a few lines for people."""

from __future__ import annotations

import textwrap
from typing import Final

from geo_ray.observe.status.record import RegionStatus, RunStatus
from geo_ray.observe.text import (
    bytes_text,
    coarse_text,
    counted,
    duration_text,
    metrics_text,
    number_text,
    printable,
)

_LEAST_WIDTH: Final = 40


def status_lines(status: RunStatus, width: int | None = None) -> list[str]:
    """Describe a run in lines; each but the first begins with what it is about.

    Args:
        status: of the run.
        width: columns of the terminal; longer lines are wrapped and indented. None: no limit.
    """
    head = [f"{status.run}: {status.phase}"]
    if status.strategy is not None:
        head.append(status.strategy)
    if status.is_going and status.left_s is not None:
        head.append(f"about {coarse_text(status.left_s)} left")
    rows = [("", ", ".join(head))]
    rows += [] if status.message is None else [("cause", _one_line(status.message))]
    rows += [] if status.fix is None else [("fix", _one_line(status.fix))]
    rows.append(("driver", _driver(status)))
    members = [region for region in status.regions if region.lost_cause is None]
    rows += [
        ("member" if number == 0 else "", _region(each)) for number, each in enumerate(members)
    ]
    rows += [
        ("lost", f"{each.name} after step {each.step:,}: {_one_line(each.lost_cause)}")
        for each in status.regions
        if each.lost_cause is not None
    ]
    rows += [] if status.refused is None else [("refused", _one_line(status.refused))]
    rows += [("training", _training(status))] if status.regions else []
    rows += [("saved", _saved(status))] if status.regions else []
    rows.append(("spent", _spent(status)))
    wide = max(len(name) for name, _ in rows)
    lines = _wrapped("", rows[0][1], width)
    for name, text in rows[1:]:
        lines += _wrapped(f"  {name:<{wide}}  ", text, width)
    return lines


def _wrapped(head: str, text: str, width: int | None) -> list[str]:
    line = printable(head + text)
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        printable(text),
        max(width, _LEAST_WIDTH),
        initial_indent=head,
        subsequent_indent=" " * (len(head) or 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _driver(status: RunStatus) -> str:
    driver = status.driver
    if driver is None:
        return "none is noted: a simulation, or a run of an earlier release"
    return f"host {driver.host}, process {driver.pid}, since {driver.since}: {driver.how}"


def _region(region: RegionStatus) -> str:
    steps = f"step {region.step:,}"
    if region.steps is not None:
        steps += f" of {region.steps:,}"
    parts = [steps, counted(region.exchanges, "exchange"), f"loss {number_text(region.loss)}"]
    if region.has_pace:
        parts.append(f"{number_text(region.samples_per_s)} samples/s")
    if region.workers_lost:
        parts.append(f"{counted(region.workers_lost, 'worker')} lost")
    return f"{region.name}: {', '.join(parts)}, {region.state}"


def _training(status: RunStatus) -> str:
    parts = [f"loss {number_text(status.loss)}"]
    if status.is_going is not False and any(region.has_pace for region in status.regions):
        parts.append(f"{number_text(status.samples_per_s)} samples/s")
    if status.round is not None:
        parts.append(f"round {status.round:,}")
    if len(status.regions) > 1 and status.averager is not None:
        parts.append(f"averager in {status.averager}")
    if status.eval_step is not None:
        parts.append(f"at step {status.eval_step:,} {metrics_text(status.eval)}")
    target = status.target
    if target is not None:
        bound = "at least" if target.direction == "at_least" else "at most"
        reached = (
            "not reached"
            if target.reached_s is None
            else f"reached after {duration_text(target.reached_s)}"
        )
        parts.append(f"target {target.metric} {bound} {number_text(target.value)}: {reached}")
    return ", ".join(parts)


def _saved(status: RunStatus) -> str:
    found = status.checkpoint
    if found is None:
        return "no checkpoint yet"
    # Ages count from what was heard last, which says nothing once the run has ended.
    age = ""
    if found.age_s is not None and status.is_going is not False:
        age = f", {coarse_text(found.age_s)} ago"
    unhealthy = "" if found.healthy else ", taken while the run was diverging"
    return (
        f"checkpoint {found.id} at step {found.step:,}{age}, {bytes_text(found.bytes)}{unhealthy}"
    )


def _spent(status: RunStatus) -> str:
    spent = status.spent
    parts = [duration_text(spent.seconds), f"{bytes_text(spent.wan_bytes)} between regions"]
    if spent.usd is not None:
        parts.append(f"{number_text(spent.usd)} USD")
    return ", ".join(parts)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
