"""The machines of a run as its autoscaler noted them, or else as its plan has them."""

from __future__ import annotations

from geo_ray.autoscale.journal import JOURNAL_KEY
from geo_ray.autoscale.memory import AutoscalerMemory, Duty, Intent, decode_memory, outstanding
from geo_ray.lease.store import ConditionalStore
from geo_ray.observe.picture.view import MachineRow, MachinesView
from geo_ray.planning.plan import Plan


def machines_of(
    store: ConditionalStore, plan: Plan | None, now_unix_s: float
) -> MachinesView | None:
    """Give the machines of a run; None where nothing is known of them.

    Args:
        store: where the autoscaler's journal lies, if there is one.
        plan: that the run follows, for a run without an autoscaler.
        now_unix_s: time of day.

    Raises:
        RunDirectoryError: the journal cannot be read.
        StoreError: the bucket does not answer or refuses.
    """
    found = store.read(JOURNAL_KEY)
    if found is not None:
        return _noted(decode_memory(found.data), now_unix_s)
    return None if plan is None else _planned(plan)


def _noted(memory: AutoscalerMemory, now_unix_s: float) -> MachinesView:
    duties = (*memory.heads.values(), *memory.duties.values())
    rows = [_there(duty, now_unix_s) for duty in duties]
    for intent in memory.intents.values():
        missing = outstanding(memory, intent)
        if missing > 0:
            rows.append(_asked(intent, missing))
    rows.sort(key=lambda row: (row.region, row.machine))
    return MachinesView("autoscaler", tuple(rows), memory.ledger.paid_usd)


def _there(duty: Duty, now_unix_s: float) -> MachineRow:
    machine = duty.machine
    state, note = machine.state.value, duty.reason
    if duty.parting is not None:
        state, note = "leaving", duty.parting.reason
    elif duty.unready_unix_s is not None and machine.state.value == "running":
        state = "without a node"
    return MachineRow(
        region=machine.labels.get("ray.io/availability-region", machine.pool.region),
        machine=machine.id,
        type=f"{machine.pool.type} {machine.pool.market.value.replace('_', '-')}",
        state=state,
        usd_per_hour=duty.usd_per_hour,
        age_s=now_unix_s - machine.launched_unix_s,
        note=note,
    )


def _asked(intent: Intent, missing: int) -> MachineRow:
    pool = intent.request.pool
    return MachineRow(
        region=intent.request.labels.get("ray.io/availability-region", pool.region),
        machine=f"{missing} x",
        type=f"{pool.type} {pool.market.value.replace('_', '-')}",
        state="asked for",
        usd_per_hour=missing * intent.usd_per_hour,
        note=intent.reason,
    )


def _planned(plan: Plan) -> MachinesView:
    rows = [
        MachineRow(
            region=region.region,
            machine=f"{each.count} x",
            type=f"{each.type} {each.market.replace('_', '-')}",
            state="planned",
            usd_per_hour=each.count * each.usd_per_h,
        )
        for region in plan.regions
        for each in region.machines
    ]
    return MachinesView("plan", tuple(rows))
