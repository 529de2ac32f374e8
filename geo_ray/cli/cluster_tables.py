"""Tables and lines of `geo-ray up` and `geo-ray status CLUSTER`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.box import SIMPLE_HEAD
from rich.console import Console

from geo_ray.api.clusters import UpCluster
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import duration_text
from geo_ray.cloud.cluster.offer import ClusterOffer, OfferedMachines
from geo_ray.cloud.cluster.status import ClusterMachineRow, ClusterReport, DecisionRow
from geo_ray.planner.plan import Plan

_DECISIONS = 6
_WIDTH = 130


def wide_console() -> Console:
    """Return the console for tables of machines; output that is not a terminal is not cut off."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH))


def offer_table(offer: ClusterOffer) -> FittedTable:
    """Print the machines to rent, and the alternatives."""
    table = _table(("region", "role", "machines", "market", "in"), ("USD/h each", "USD/Mrow"))
    table.add_column("")
    for each in offer.machines:
        usd, score = each.usd_per_hour, each.usd_per_million_rows
        cells = (
            each.region or "-",
            each.role,
            f"{each.count} x {each.type}" if each.count else f"    {each.type}",
            each.market.replace("_", "-"),
            each.at,
            "not known" if usd is None else f"{usd:.4g}",
            "" if score is None or each.role != "worker" else f"{score:.3g}",
            "" if each.count else each.note or _why_not(each, offer),
        )
        table.add_row(*cells)
    return table


def offer_lines(offer: ClusterOffer) -> list[str]:
    """Return the lines about the cost, and about the budget."""
    head_cost = f", {offer.head_usd:.4g} USD for the head" if offer.head_usd else ""
    lines = [
        f"{offer.usd_per_hour:.4g} USD/h for machines; the run: {offer.total_usd:.4g} USD as "
        f"planned{head_cost}"
    ]
    all_usd = offer.total_usd + offer.head_usd
    if offer.budget_usd is not None and all_usd > offer.budget_usd:
        lines.append(
            f"plan.budget_usd is {offer.budget_usd:.4g}: machines would be terminated before the "
            "run "
            "is done"
        )
    return lines


def plan_lines(plan: Plan) -> list[str]:
    """Return the assumptions of these costs about exchanges, and the plan's notes."""
    return [
        f"planned with an exchange every {plan.interval} steps, {plan.codec or 'no codec'}: "
        "`geo-ray train --plan` uses these, `geo-ray train` those of the configuration",
        *(f"note     {note}" for note in plan.notes),
    ]


def _why_not(other: OfferedMachines, offer: ClusterOffer) -> str:
    """Return why no machine of a pool would be rented, if the pool gives no reason."""
    node_group = (other.region, other.role)
    rented = [
        m.usd_per_million_rows for m in offer.machines if m.count and _node_group(m) == node_group
    ]
    score = other.usd_per_million_rows
    if score is not None and all(each is not None and score < each for each in rented):
        return "cheaper, but preemptible (autoscale.floor)"
    return "dearer"


def _node_group(machines: OfferedMachines) -> tuple[str, str]:
    return machines.region, machines.role


def machines_table(report: ClusterReport) -> FittedTable:
    """Print the machines of a cluster."""
    table = _table(("machine", "role", "region", "type", "market", "state"), ("age", "USD/h"))
    table.add_column("")
    head: Sequence[ClusterMachineRow] = () if report.head is None else (report.head,)
    for row in (*head, *report.machines):
        cells = (
            row.id,
            row.role,
            row.region or "-",
            row.type,
            row.market.replace("_", "-"),
            _state(row),
            duration_text(row.age_s),
            "?" if row.usd_per_hour is None else f"{row.usd_per_hour:.4g}",
            _leaves(row),
        )
        table.add_row(*cells)
    return table


def report_lines(report: ClusterReport) -> list[str]:
    """Return the lines about a cluster except its machines."""
    lines = [f"{report.name} is {report.phase}; {', '.join(report.clouds)}; id {report.id}"]
    if report.address is not None:
        lines.append(f"head     {report.address}, job server {report.job_server}")
        lines += _tunnel(report)
    for node_group in report.node_groups:
        extra = [f"{node_group.coming} coming"] if node_group.coming else []
        extra += [f"{node_group.leaving} leaving"] if node_group.leaving else []
        more = f" ({', '.join(extra)})" if extra else ""
        name = (
            f"{node_group.region}/{node_group.role}"
            if node_group.role != "worker"
            else node_group.region
        )
        lines.append(f"plan     {name}: {node_group.ready} of {node_group.planned} machines{more}")
    lines.append(f"cost     {report.usd_per_hour:.4g} USD/h, {report.spent_usd:.4g} USD so far")
    if report.budget_usd is not None:
        used = (
            "used up: nothing is rented until `geo-ray up` has a larger plan.budget_usd; the "
            "head keeps costing until `geo-ray down`"
        )
        rest_usd = max(0.0, report.budget_usd - report.spent_usd)
        rest = used if report.is_stopped else f"{rest_usd:.4g} USD left"
        lines.append(f"budget   {report.budget_usd:.4g} USD; {rest}")
    if report.left_s is not None and report.to_finish_usd is not None:
        lines.append(
            f"left     {duration_text(report.left_s)} of the run, "
            f"{report.to_finish_usd:.4g} USD at this rate"
        )
    lines += [f"note     {note}" for note in report.notes]
    return lines


def decision_lines(report: ClusterReport) -> list[str]:
    """Return the last decisions of the autoscaler, with the alternatives of launches."""
    lines = []
    for each in report.decisions[-_DECISIONS:]:
        ago = duration_text(max(0.0, time.time() - each.unix_s))
        lines.append(f"did      {each.region}: {each.what}, {ago} ago: {each.reason or 'the plan'}")
        lines += _alternatives(each)
    return lines


def reach_lines(made: UpCluster, config: Path) -> list[str]:
    """Return how to reach a cluster, its cost, and the next steps."""
    lines = [f"cost     {made.report.usd_per_hour:.4g} USD/h"]
    lines += [f"note     {note}" for note in made.report.notes]
    shown = quote(made.state.shown)
    if made.environment:
        values = " ".join(f"{name}={quote(value)}" for name, value in made.environment.items())
        lines.append(f"reach    export {values}")
    else:
        lines.append(f"head     {made.report.address}, job server {made.report.job_server}")
        lines.append(f"token    {made.token_command}")
        lines += _tunnel(made.report)
    lines += [
        f"train    ray job submit --working-dir . -- geo-ray train {quote(str(config))}",
        f"status   geo-ray status {shown}",
        f"delete   geo-ray down {shown}",
    ]
    return lines


def _tunnel(report: ClusterReport) -> list[str]:
    """Return how to reach a job server that listens only on the head."""
    return [] if report.tunnel is None else [f"tunnel   {report.tunnel}"]


def _alternatives(decision: DecisionRow) -> list[str]:
    lines = []
    for other in decision.alternatives:
        usd, score = other["usd_per_hour"], other["usd_per_million_rows"]
        price = "no price" if usd is None else f"{usd:.4g} USD/h"
        rows = "" if score is None else f", {score:.4g} USD per million rows"
        note = f" ({other['note']})" if other["note"] else ""
        chosen = f" <- {other['chosen']}" if other["chosen"] else ""
        lines.append(
            f"         {other['at']} {other['type']} {other['market']}: {price}{rows}{note}{chosen}"
        )
    return lines


def _state(row: ClusterMachineRow) -> str:
    if row.is_ready or row.state != "running":
        return row.state
    return "joining" if row.leaves is None else "leaving"


def _leaves(row: ClusterMachineRow) -> str:
    if row.role == "head" or row.leaves is None:
        return ""
    if row.leaves_in_s is None:
        return f"leaves: {row.leaves}"
    return f"leaving: {row.leaves}, terminated in {duration_text(max(0.0, row.leaves_in_s))}"


def _table(left: Sequence[str], right: Sequence[str]) -> FittedTable:
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
