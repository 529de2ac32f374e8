"""Tencent Cloud machines: CVM, on demand and spot.

Launches are asynchronous: an accepted machine is pending and may still fail to start. Each machine
has an action timer with which the cloud ends it. Ended machines soon disappear from lists.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final

from geo_ray.base.errors import CloudError, CloudUnreachableError, ProviderRefusedError
from geo_ray.cloud.boot_script import boot_script, is_head, needed_join
from geo_ray.cloud.provider import (
    CLUSTER_TAG,
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    LaunchRequest,
    Machine,
    MachineState,
    Market,
    Pool,
    as_provider_errors,
    failure,
    read_tags,
    tags_of,
    unstarted,
)
from geo_ray.experiment.provider import TencentPlaceConfig, TencentProviderConfig
from geo_ray.prices.price import PriceRecord, usd_per_unit
from geo_ray.prices.query import making_sense
from geo_ray.prices.tencent import SLOW_DOWN, Tencent, fetch_instances

_STATES: Final = {
    "PENDING": MachineState.PENDING,
    "LAUNCH_FAILED": MachineState.ENDED,
    "RUNNING": MachineState.RUNNING,
    "STARTING": MachineState.PENDING,
    "REBOOTING": MachineState.RUNNING,
    "STOPPING": MachineState.ENDING,
    "STOPPED": MachineState.ENDING,  # its disk is still charged
    "SHUTDOWN": MachineState.ENDED,  # about to disappear from the list
    "TERMINATING": MachineState.ENDING,
}
_CHARGES: Final = {Market.ON_DEMAND: "POSTPAID_BY_HOUR", Market.SPOT: "SPOTPAID"}
_SOLD_OUT: Final = ("ResourcesSoldOut", "ResourceInsufficient")
_SPOT_PRICE: Final = "InvalidParameterValue.InsufficientPrice"
_QUOTA: Final = ("LimitExceeded", "InvalidAccount.InsufficientBalance")
_DENIED: Final = ("UnauthorizedOperation", "AuthFailure")
_MOST_VALUES: Final = 5  # limit of values per filter
_MOST_IDS: Final = 100
_PAGE: Final = 100
_TIMER_S: Final = 330.0  # the cloud requires at least 5 minutes
_PRICES_S: Final = 60.0


class TencentProvider:
    """CVM provider; see the module.

    Args:
        config: regions, images, networks, and how nodes join.
        tencent: the account; None: that of the default credentials.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(self, config: TencentProviderConfig, tencent: Tencent | None = None) -> None:
        self._config = config
        self._tencent = tencent or Tencent(
            config.endpoint, attempts=config.attempts, timeout_s=config.timeout_s
        )
        self._prices: dict[tuple[str, str], tuple[float, list[PriceRecord]]] = {}

    @property
    def name(self) -> str:
        """Name of the provider."""
        return "tencent"

    def of_region(self, region: str) -> TencentProvider:
        """Return a provider for one region of the same account."""
        places = {region: self._config.places[region]}
        return TencentProvider(self._config.model_copy(update={"places": places}), self._tencent)

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """Return all machines with the cluster's tag, in all regions."""
        return [machine for machine, _ in self._listed(cluster)]

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Launch machines of one pool."""
        region = request.pool.region
        place = self._config.places.get(region)
        if place is None:
            raise ProviderRefusedError(
                f"region {region} of tencent is not configured",
                fix=f"Add {region} to `places`, with its machine image and its network.",
            )
        join = needed_join(self._config.join)
        script = boot_script(request, join, "tencent", "tencent-ssm")
        asked = _run_instances(request, place, script)
        with as_provider_errors("cvm:RunInstances", _is_denied):
            try:
                reply = self._tencent.call(region, "RunInstances", asked)
            except CloudError as error:
                kind = _failure_kind(error)
                if kind is None:
                    raise
                return [failure(request, request.count, kind, error.message)]
            with making_sense(f"tencent RunInstances in {region}"):
                came = len(reply["InstanceIdSet"])
        if came >= request.count:
            return []
        why = f"tencent launched {came} of {request.count} machines"
        return [failure(request, request.count - came, LaunchFailureKind.SOLD_OUT, why)]

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """Terminate machines in any region."""
        wanted = list(dict.fromkeys(machine_ids))
        for region in self._config.places if wanted else ():
            by_charge: dict[str, list[str]] = {}
            for begin in range(0, len(wanted), _MOST_VALUES):
                # A filter, since an unknown id would be an error.
                some = wanted[begin : begin + _MOST_VALUES]
                for item in self._described(region, "instance-id", some):
                    if _STATES[item["InstanceState"]] in (
                        MachineState.PENDING,
                        MachineState.RUNNING,
                    ) or item["InstanceState"] in ("STOPPING", "STOPPED"):
                        by_charge.setdefault(item["InstanceChargeType"], []).append(
                            item["InstanceId"]
                        )
            for living in by_charge.values():  # the cloud accepts one charge type per call
                for begin in range(0, len(living), _MOST_IDS):
                    self._end(region, living[begin : begin + _MOST_IDS])

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return machines that were accepted but could not start."""
        found = []
        for machine, item in self._listed(cluster):
            if item["InstanceState"] == "LAUNCH_FAILED" and machine.request_id is not None:
                said = str(item.get("LatestOperationErrorMsg") or "the launch failed")
                kind = _kind_of(said) or LaunchFailureKind.SOLD_OUT
                found.append(unstarted(machine, machine.request_id, kind, said))
        return found

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """Return prices and availability, at most a minute old."""
        return [self._availability(pool) for pool in pools]

    # ------------------------------------------------------------------ parts

    def _end(self, region: str, ids: list[str]) -> None:
        with as_provider_errors("cvm:TerminateInstances", _is_denied):
            try:
                self._tencent.call(region, "TerminateInstances", {"InstanceIds": ids})
            except CloudError as error:
                if not error.said.startswith(("InvalidInstanceId", "InvalidInstance.")):
                    raise
                if len(ids) > 1:  # one of them may have ended just now
                    for id_ in ids:
                        self._end(region, [id_])

    def _listed(self, cluster: str) -> Iterator[tuple[Machine, Mapping[str, Any]]]:
        for region in self._config.places:
            for item in self._described(region, f"tag:{CLUSTER_TAG}", [cluster]):
                with as_provider_errors("", _is_denied), making_sense(f"tencent cvm in {region}"):
                    machine = _machine(item, region)
                yield machine, item

    def _described(self, region: str, filter_: str, values: list[str]) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        with as_provider_errors("cvm:DescribeInstances", _is_denied):
            while True:
                asked = {
                    "Filters": [{"Name": filter_, "Values": values}],
                    "Offset": len(found),
                    "Limit": _PAGE,
                }
                reply = self._tencent.call(region, "DescribeInstances", asked)
                with making_sense(f"tencent DescribeInstances in {region}"):
                    page, total = reply["InstanceSet"], int(reply["TotalCount"])
                    found += page
                if len(found) >= total or not page:
                    return found

    def _availability(self, pool: Pool) -> Availability:
        key = (pool.region, pool.type)
        known = self._prices.get(key)
        if known is None or time.monotonic() - known[0] > _PRICES_S:
            with as_provider_errors("cvm:DescribeZoneInstanceConfigInfos", _is_denied):
                records = fetch_instances(
                    self._tencent, pool.region, [pool.type], self._config.currency
                )
            known = self._prices[key] = (time.monotonic(), records)
        matching = [
            record
            for record in known[1]
            if record.market == pool.market.value and pool.zone in (None, record.zone)
        ]
        if not matching:
            return Availability(pool, None)
        there = [record for record in matching if record.availability != "none"]
        cheapest = min(there or matching, key=attrgetter("amount"))
        usd = cheapest.amount * usd_per_unit(cheapest.currency, self._config.rates)
        return Availability(pool, usd, available=None if there else 0)


def _run_instances(
    request: LaunchRequest, place: TencentPlaceConfig, script: str
) -> dict[str, Any]:
    zones = sorted(place.subnets)
    zone = request.pool.zone or zones[sum(request.request_id.encode()) % len(zones)]
    if zone not in place.subnets:
        raise ProviderRefusedError(
            f"no subnet is configured in {zone}", fix="Add the zone's subnet to `subnets`."
        )
    tags = [{"Key": key, "Value": value} for key, value in tags_of(request).items()]
    asked: dict[str, Any] = {
        "ClientToken": request.request_id,
        "Placement": {"Zone": zone},
        "InstanceType": request.pool.type,
        "ImageId": place.image_id,
        "InstanceChargeType": _CHARGES[request.pool.market],
        "InstanceCount": request.count,
        "MinCount": 1,
        "VirtualPrivateCloud": {"VpcId": place.vpc_id, "SubnetId": place.subnets[zone]},
        "SystemDisk": {"DiskType": "CLOUD_BSSD", "DiskSize": place.disk_gb},
        "UserData": base64.b64encode(script.encode()).decode(),
        "TagSpecification": [{"ResourceType": "instance", "Tags": tags}],
    }
    if place.security_group_ids:
        asked["SecurityGroupIds"] = list(place.security_group_ids)
    role = place.role
    if is_head(request) and place.head_role is not None:
        role = place.head_role
    if role is not None:
        asked["CamRoleName"] = role
    if request.pool.market is Market.SPOT:  # without a price limit: the current price is charged
        asked["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time"},
        }
    if request.ends_unix_s is not None:
        at = datetime.fromtimestamp(max(request.ends_unix_s, time.time() + _TIMER_S), UTC)
        asked["ActionTimer"] = {
            "TimerAction": "TerminateInstances",
            "ActionTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    return asked


def _machine(item: Mapping[str, Any], region: str) -> Machine:
    tags = read_tags({tag["Key"]: tag["Value"] for tag in item.get("Tags") or []})
    market = Market.SPOT if item["InstanceChargeType"] == "SPOTPAID" else Market.ON_DEMAND
    created = datetime.strptime(item["CreatedTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return Machine(
        id=item["InstanceId"],
        request_id=tags.request_id,
        pool=Pool(region, item["Placement"]["Zone"], item["InstanceType"], market),
        state=_STATES[item["InstanceState"]],
        launched_unix_s=created.timestamp(),
        address=next(iter(item.get("PrivateIpAddresses") or ()), None),
        labels=tags.labels,
        ends_unix_s=tags.ends_unix_s,
        cluster_id=tags.cluster_id,
    )


def _failure_kind(error: CloudError) -> LaunchFailureKind | None:
    """Return the kind of a launch failure; None: machines may have been launched."""
    if error.said.startswith(SLOW_DOWN):
        return LaunchFailureKind.THROTTLED
    return None if isinstance(error, CloudUnreachableError) else _kind_of(error.said)


def _kind_of(code: str) -> LaunchFailureKind | None:
    if code.startswith(_SOLD_OUT) or code == _SPOT_PRICE:
        return LaunchFailureKind.SOLD_OUT
    return LaunchFailureKind.QUOTA if code.startswith(_QUOTA) else None


def _is_denied(code: str) -> bool:
    return code.startswith(_DENIED)
