"""Creates a cluster: its record, token and head. The autoscaler on the head launches the rest.

The command may be killed at any point and repeated: it writes each step before it executes it, and
a repeated launch of the head creates no second machine. Concurrent commands wait for each other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from geo_ray.base.errors import (
    ClusterStartError,
    ClusterStateError,
    ProviderRefusedError,
    RegionsUnreachableError,
)
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY
from geo_ray.cloud.autoscaler.journal_read import put_aside, read_journal
from geo_ray.cloud.autoscaler.state import AutoscalerState, encode_memory
from geo_ray.cloud.autoscaler.target import ROLE_LABEL
from geo_ray.cloud.cluster.head import (
    find_head,
    head_address,
    head_ends_unix_s,
    head_request,
    is_alive,
    listed_for_head,
)
from geo_ray.cloud.cluster.providers import (
    check_name_is_free,
    key_of_own_role,
    open_accounts,
    open_clouds,
    secrets_of,
)
from geo_ray.cloud.cluster.spec import ClusterSpec
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState, cluster_lock
from geo_ray.cloud.cluster.status import ClusterReport, report_of, unresponsive_s
from geo_ray.cloud.local import LocalCatalog, catalog_path, read_catalog, write_catalog
from geo_ray.cloud.provider import HEAD_ROLE, Machine, MachineProvider
from geo_ray.cloud.secrets import SecretStore
from geo_ray.runs.lease import LeaseKeeper

Notify = Callable[[str], None]

_HEAD_S: Final = 900.0
_UNSEEN_S: Final = 120.0


def make_cluster(asked: ClusterSpec, notify: Notify) -> ClusterRecord:
    """Create a cluster up to its head, or complete an unfinished one.

    Args:
        asked: specification; for a cluster that is up, the stored record has precedence.
        notify: called with a message for each step.

    Raises:
        ClusterStateError: the cluster is being taken down, or has another configuration.
        ClusterNameTakenError: another cluster of the name runs in the same account.
        ClusterBusyError: another command holds the cluster and does not finish.
        ClusterStartError: its head does not start.
        CloudError: the cloud refuses a call.
    """
    state = asked.state
    state.make()
    with cluster_lock(state, "up", notify) as lease:
        record = _written(asked, notify)
        if asked.catalog is not None:
            _add_offers(state.path / "cloud", asked.catalog)
        _put_token(record, state, notify)
        return _with_head(record, state, lease, notify)


def await_machines(
    record: ClusterRecord, state: ClusterState, longest_s: float, notify: Notify
) -> ClusterReport:
    """Wait until the autoscaler runs and all planned machines work.

    Args:
        record: record of the cluster.
        state: its folder.
        longest_s: timeout after the first report of the autoscaler; the status then shows what is
            missing.
        notify: called with a message for each change.

    Raises:
        ClusterStateError: another command takes the cluster down.
        ClusterStartError: its head ended.
    """
    head_s = time.monotonic() + _HEAD_S
    deadline_s: float | None = None
    reported = ""
    provider = open_clouds(record, state, longest_s=record.autoscale.answer_s)
    monitor = _ReportMonitor(unresponsive_s(record))
    while True:
        if state.known().phase != "up":
            raise ClusterStateError(f"{record.name} is being taken down by another command")
        report = report_of(record, state, provider, is_heard=monitor.is_heard())
        monitor.note_report(report.reported_unix_s)
        if report.head is not None and report.head.state in ("ending", "ended"):
            raise ClusterStartError(
                f"the head of {record.name} ended while starting{_last_words(provider, report)}",
                fix="Repeat `geo-ray up`, which launches another one.",
            )
        have = sum(row.is_ready for row in report.machines)
        text = f"{have} of {report.wanted} machines are ready" if report.acts else ""
        if text and text != reported:
            reported = text
            notify(text)
        now_s = time.monotonic()
        if report.acts and deadline_s is None:
            deadline_s = now_s + longest_s
        if report.acts and (have >= report.wanted or report.is_idle or report.is_stopped):
            return report
        if deadline_s is not None and now_s >= deadline_s:
            return report
        if deadline_s is None and now_s > head_s:
            raise ClusterStartError(
                f"the head of {record.name} runs, but its autoscaler has not reported for "
                f"{_HEAD_S:.0f} s{_last_words(provider, report)}",
                fix="Check the units geo-ray-node and geo-ray-cluster there: can the machine's "
                f"role read the secrets, and read and write {state.shown}?",
            )
        time.sleep(state.look_s)


@dataclass(slots=True)
class _ReportMonitor:
    """Detects reports of the autoscaler by this machine's clock only."""

    unresponsive_s: float
    _reported_unix_s: float | None = None
    _heard_s: float | None = None
    _has_observed: bool = False

    def note_report(self, reported_unix_s: float | None) -> None:
        if (
            self._has_observed
            and reported_unix_s is not None
            and reported_unix_s != self._reported_unix_s
        ):
            self._heard_s = time.monotonic()
        self._reported_unix_s, self._has_observed = reported_unix_s, True

    def is_heard(self) -> bool:
        return self._heard_s is not None and time.monotonic() - self._heard_s < self.unresponsive_s


def _written(asked: ClusterSpec, notify: Notify) -> ClusterRecord:
    """Write the record, unless the cluster is up already."""
    found, tag = asked.state.read()
    if found is None or found.phase == "down":
        again = {} if found is None else {"made": found.made + 1, "id": found.id}
        retained = {key: value for key, value in again.items() if value}
        record = asked.record.model_copy(update=retained)
        _check_name(asked, record)
        _forget(asked.state, notify)
        asked.state.write(record, tag)
        return record
    if found.phase == "ending":
        raise ClusterStateError(
            f"{found.name} is being taken down, which is not complete",
            fix=f"Complete it with `geo-ray down {asked.state.shown}`, then create it again.",
        )
    if _made_of(found) != _made_of(asked.record):
        raise ClusterStateError(
            f"{found.name} is up with another configuration",
            fix="Only `plan.budget_usd` can be changed while it is up. Choose another "
            "`name`, for the new one, or take this one down first: "
            f"`geo-ray down {asked.state.shown}`.",
        )
    _check_name(asked, found)
    budget_usd = asked.record.target.budget_usd
    if budget_usd != found.target.budget_usd:
        target = replace(found.target, budget_usd=budget_usd)
        found = found.model_copy(update={"target": target})
        asked.state.write(found, tag)
        bound = "unlimited" if budget_usd is None else f"{budget_usd:.4g} USD"
        notify(f"the budget of {found.name} changed: {bound}")
    notify(f"{found.name} exists in {asked.state.shown}: completing it")
    return found


def _add_offers(root: Path, catalog: LocalCatalog) -> None:
    """Add the pools that the cluster may request to the catalog of the local cloud."""
    if not catalog_path(root).exists():
        write_catalog(root, catalog)
        return
    known = read_catalog(root)
    pools = {offer.pool for offer in known.offers}
    new = tuple(offer for offer in catalog.offers if offer.pool not in pools)
    if new:
        cpus = catalog.cpus | known.cpus
        offers = (*known.offers, *new)
        write_catalog(root, known.model_copy(update={"offers": offers, "cpus": cpus}))


def _check_name(asked: ClusterSpec, record: ClusterRecord) -> None:
    """Reject the name of a running cluster."""
    state = asked.state
    if asked.catalog is None or catalog_path(state.path / "cloud").exists():
        check_name_is_free(open_accounts(record, state), record.name, record.id, state.shown)


def _made_of(record: ClusterRecord) -> object:
    """Return what identifies a cluster: its configuration, its clouds and its stack."""
    existing = record.head.existing
    stack = None if existing is None else (existing, record.provider)
    return record.digest, record.clouds, stack


def _forget(state: ClusterState, notify: Notify) -> None:
    """Reset the journal; keep pool statistics and the request counter."""
    store = state.store()
    aside = put_aside(store)
    if aside is not None:
        notify(f"the autoscaler's journal cannot be read; it is saved as {aside} in {state.shown}")
    found = store.read(JOURNAL_KEY)
    if found is not None:
        before = read_journal(store).memory
        memory = AutoscalerState(before.token, before.launches, pools=before.pools)
        data = encode_memory(memory)
        if data != found.data:
            store.write(JOURNAL_KEY, data, found.tag)


def _put_token(record: ClusterRecord, state: ClusterState, notify: Notify) -> None:
    """Put the same token into every store that lacks it, before any machine needs it."""
    stores = secrets_of(record, state)
    found = [_held(store, record.token_secret) for store in stores]
    token = next(filter(None, found), None) or secrets.token_hex(32)
    for store, held in zip(stores, found, strict=True):
        if held != token:
            store.put(record.token_secret, token)
            notify("the token of the cluster is in its secret store")


def _held(store: SecretStore, name: str) -> str | None:
    try:
        return store.get(name)
    except ProviderRefusedError as error:
        if "has no secret" not in error.message:
            raise
        return None


def _with_head(
    record: ClusterRecord, state: ClusterState, lease: LeaseKeeper, notify: Notify
) -> ClusterRecord:
    """Launch the head unless it runs, and wait for its address."""
    existing = record.head.existing
    if existing is not None:
        notify(f"the head {existing.machine} at {existing.address} is that of {existing.stack}")
        return record
    provider = open_clouds(record, state)
    machines = listed_for_head(provider, record)
    head = find_head(machines, record)
    has_ended = not is_alive(head) if head is not None else record.head.is_known
    if has_ended or (head is None and _is_stale(record)):
        if has_ended:
            notify("the head has ended: launching another one")
        # With a new end time: that of the earlier head may have passed.
        changes = {
            "number": record.head.number + 1,
            "is_known": False,
            "ends_unix_s": head_ends_unix_s(record.provider, record.clouds, time.time()),
        }
        record, head = _with(record, state, lease, **changes), None
    _end_other_heads(provider, machines, record, notify)
    if head is None:
        pool = record.head.pool
        notify(f"launching the head: {pool.type} in {pool.zone or pool.region}")
        key = key_of_own_role(record)
        if key is not None:
            notify(f"nodes share the head's role and its permissions: `{key}` sets a separate role")
        lease.check()
        failures = provider.launch(head_request(record))
        if failures:
            raise ClusterStartError(
                f"the head cannot be launched: {failures[0].reason} ({failures[0].kind.value})",
                fix="Name another `provider.head.type`, `zone` or `region`, or try again later; "
                f"`geo-ray down {state.shown}` releases existing machines.",
            )
    try:
        _await_head(provider, record, state, notify)
    except ClusterStartError:
        _with(record, state, lease, is_known=True)
        raise
    return _with(record, state, lease, is_known=True)


def _is_stale(record: ClusterRecord) -> bool:
    """Whether a launch was recorded so long ago that the head would soon end by itself."""
    now_s = time.time()
    whole_s = head_ends_unix_s(record.provider, record.clouds, now_s) - now_s
    ends_s = record.head.ends_unix_s
    return ends_s is not None and ends_s - now_s < whole_s / 2


def _with(
    record: ClusterRecord, state: ClusterState, lease: LeaseKeeper, **changes: object
) -> ClusterRecord:
    """Record the state of the head."""
    record = record.model_copy(update={"head": record.head.model_copy(update=changes)})
    found, tag = state.read()
    lease.check()
    if found != record:
        state.write(record, tag)
    return record


def _end_other_heads(
    provider: MachineProvider, machines: Sequence[Machine], record: ClusterRecord, notify: Notify
) -> None:
    """Terminate replaced heads, which may have appeared late."""
    wanted = head_request(record).request_id
    others = [
        machine.id
        for machine in machines
        if machine.labels.get(ROLE_LABEL) == HEAD_ROLE
        and machine.request_id != wanted
        and is_alive(machine)
    ]
    if others:
        notify(f"ending {', '.join(others)}: a replaced head")
        provider.terminate(others)


def _await_head(
    provider: MachineProvider, record: ClusterRecord, state: ClusterState, notify: Notify
) -> None:
    deadline_s = time.monotonic() + _HEAD_S
    unseen_s = time.monotonic() + _UNSEEN_S
    while True:
        head = find_head(listed_for_head(provider, record), record)
        address = head_address(head, record)
        if head is not None and address is not None:
            notify(f"the head {head.id} runs at {address}")
            return
        if head is not None and not is_alive(head):
            raise ClusterStartError(
                f"the head {head.id} ended before it ran{_why(provider, record)}",
                fix="Repeat `geo-ray up`, which launches another one.",
            )
        now_s = time.monotonic()
        if now_s > deadline_s or (head is None and now_s > unseen_s):
            raise ClusterStartError(
                f"the head of {record.name} was launched but does not run",
                fix="Repeat `geo-ray up`, or release it with `geo-ray down`.",
            )
        time.sleep(state.look_s)


def _why(provider: MachineProvider, record: ClusterRecord) -> str:
    wanted = head_request(record).request_id
    try:
        failures = provider.poll_failures(record.name)
    except RegionsUnreachableError as error:
        failures = error.found
    for failure in failures:
        if failure.request_id == wanted:
            return f": {failure.reason}"
    return ""


def _last_words(provider: MachineProvider, report: ClusterReport) -> str:
    """Return the last output of the head's processes; local clouds only."""
    logs = getattr(provider, "logs", None)
    if logs is None or report.head is None:
        return ""
    text = "\n".join(logs(report.head.id).values()).strip().splitlines()[-8:]
    return ":\n" + "\n".join(f"  {line}" for line in text) if text else ""
