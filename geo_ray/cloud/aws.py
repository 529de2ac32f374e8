"""AWS machines: EC2, on demand and spot.

A launch is one RunInstances call for one pool. Its client token is the request id, so a repeated
request returns the machines of the first one; with a minimum count of 1 the pool provides what it
has. EC2 fleets are not used: a fleet would choose among pools by itself, but the caller has already
chosen with prices, preemption rates and egress that EC2 does not know, and each request would need
a launch template that could leak.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
from geo_ray.experiment.provider import AwsPlaceConfig, AwsProviderConfig
from geo_ray.prices.aws import SLOW_DOWN, Aws, fetch_on_demand, fetch_spot
from geo_ray.prices.query import making_sense

_STATES: Final = {
    "pending": MachineState.PENDING,
    "running": MachineState.RUNNING,
    "shutting-down": MachineState.ENDING,
    "stopping": MachineState.ENDING,
    "stopped": MachineState.ENDING,  # its volume is still charged
    "terminated": MachineState.ENDED,
}
_SOLD_OUT: Final = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "SpotMaxPriceTooLow",
        "Unsupported",  # the type is not offered in the zone
    }
)
_QUOTA: Final = frozenset(
    {
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "VcpuLimitExceeded",
        "VolumeLimitExceeded",
        "InsufficientFreeAddressesInSubnet",
    }
)
_DENIED: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "OptInRequired",
        "UnauthorizedOperation",
    }
)
_PRICES_S: Final = 300.0
_MOST_IDS: Final = 100


class AwsProvider:
    """EC2 provider; see the module.

    Args:
        config: regions, images, networks, and how nodes join.
        aws: the account; None: that of the default credentials.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(self, config: AwsProviderConfig, aws: Aws | None = None) -> None:
        self._config = config
        self._aws = aws or Aws(
            config.endpoints, attempts=config.attempts, timeout_s=config.timeout_s
        )
        self._prices: dict[tuple[str, str, Market], tuple[float, dict[str | None, float]]] = {}

    @property
    def name(self) -> str:
        """Name of the provider."""
        return "aws"

    def of_region(self, region: str) -> AwsProvider:
        """Return a provider for one region of the same account."""
        places = {region: self._config.places[region]}
        return AwsProvider(self._config.model_copy(update={"places": places}), self._aws)

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """Return all machines with the cluster's tag, in all regions."""
        return [machine for machine, _ in self._listed(cluster)]

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Launch machines of one pool."""
        place = self._place(request.pool.region)
        arguments = _run_instances(request, place, self._user_data(request))
        with as_provider_errors("ec2:RunInstances", _is_denied):
            try:
                reply = self._aws.call("ec2", request.pool.region, "run_instances", **arguments)
            except CloudError as error:
                failure_kind = _failure_kind(error)
                if failure_kind is None:
                    raise
                return [failure(request, request.count, failure_kind, error.message)]
            with making_sense("aws ec2 run_instances"):
                came = len(reply["Instances"])
        if came >= request.count:
            return []
        why = f"aws launched {came} of {request.count} machines"
        return [failure(request, request.count - came, LaunchFailureKind.SOLD_OUT, why)]

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """Terminate machines in any region."""
        wanted = list(dict.fromkeys(machine_ids))
        for region in self._config.places if wanted else ():
            living = []
            for begin in range(0, len(wanted), _MOST_IDS):
                some = wanted[begin : begin + _MOST_IDS]
                # A filter, since an unknown id would be an error.
                for item in self._described(region, "instance-id", some):
                    if _STATES[item["State"]["Name"]] is not MachineState.ENDED:
                        living.append(item["InstanceId"])
            if living:
                with as_provider_errors("ec2:TerminateInstances", _is_denied):
                    self._aws.call("ec2", region, "terminate_instances", InstanceIds=living)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return machines that EC2 accepted but could not start."""
        found = []
        for machine, item in self._listed(cluster):
            why = item.get("StateReason") or {}
            code = str(why.get("Code", "")).rpartition(".")[2]
            failure_kind = (
                LaunchFailureKind.SOLD_OUT
                if code in _SOLD_OUT
                else LaunchFailureKind.QUOTA
                if code in _QUOTA
                else None
            )
            if failure_kind is not None and machine.request_id is not None:
                reason = f"{code}: {why.get('Message', '')}"
                found.append(unstarted(machine, machine.request_id, failure_kind, reason))
        return found

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """Return prices, at most 5 minutes old; EC2 does not publish capacity."""
        return [Availability(pool, self._price(pool)) for pool in pools]

    # ------------------------------------------------------------------ parts

    def _place(self, region: str) -> AwsPlaceConfig:
        if region not in self._config.places:
            raise ProviderRefusedError(
                f"region {region} of aws is not configured",
                fix=f"Add {region} to `places`, with its machine image and its network.",
            )
        return self._config.places[region]

    def _user_data(self, request: LaunchRequest) -> str:
        join = needed_join(self._config.join)
        return boot_script(request, join, "aws", self._config.secret_store)

    def _listed(self, cluster: str) -> Iterator[tuple[Machine, Mapping[str, Any]]]:
        for region in self._config.places:
            for item in self._described(region, f"tag:{CLUSTER_TAG}", [cluster]):
                with as_provider_errors("", _is_denied), making_sense(f"aws ec2 in {region}"):
                    machine = _machine(item, region)
                yield machine, item

    def _described(self, region: str, filter_: str, values: list[str]) -> list[Mapping[str, Any]]:
        with as_provider_errors("ec2:DescribeInstances", _is_denied):
            reservations = self._aws.listed(
                "ec2",
                region,
                "describe_instances",
                "Reservations",
                Filters=[{"Name": filter_, "Values": values}],
            )
            with making_sense(f"aws ec2 in {region}"):
                return [item for one in reservations for item in one["Instances"]]

    def _price(self, pool: Pool) -> float | None:
        key = (pool.region, pool.type, pool.market)
        known = self._prices.get(key)
        if known is None or time.monotonic() - known[0] > _PRICES_S:
            known = (time.monotonic(), self._fetched(pool))
            self._prices[key] = known
        by_zone = known[1]
        if pool.zone is None:
            return min(by_zone.values(), default=None)
        return by_zone.get(pool.zone, by_zone.get(None))

    def _fetched(self, pool: Pool) -> dict[str | None, float]:
        fetch, permission = (
            (fetch_spot, "ec2:DescribeSpotPriceHistory")
            if pool.market is Market.SPOT
            else (fetch_on_demand, "pricing:GetProducts")
        )
        with as_provider_errors(permission, _is_denied):
            records = fetch(self._aws, pool.region, [pool.type])
        return {one.zone: one.amount for one in records if one.currency == "USD"}


def _run_instances(request: LaunchRequest, place: AwsPlaceConfig, script: str) -> dict[str, Any]:
    tags = [{"Key": key, "Value": value} for key, value in tags_of(request).items()]
    volume = {"VolumeSize": place.volume_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    volume["Encrypted"] = True
    if place.kms_key_id is not None:
        volume["KmsKeyId"] = place.kms_key_id
    arguments: dict[str, Any] = {
        "ClientToken": request.request_id,
        "ImageId": place.image_id,
        "InstanceType": request.pool.type,
        "MinCount": 1,
        "MaxCount": request.count,
        "UserData": script,  # boto3 encodes it
        "InstanceInitiatedShutdownBehavior": "terminate",
        "BlockDeviceMappings": [{"DeviceName": place.root_device, "Ebs": volume}],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
        ],
    }
    zone = request.pool.zone
    if place.subnets:
        if zone is not None and zone not in place.subnets:
            raise ProviderRefusedError(
                f"no subnet is configured in {zone}", fix="Add the zone's subnet to `subnets`."
            )
        zone = zone or sorted(place.subnets)[sum(request.request_id.encode()) % len(place.subnets)]
        arguments["SubnetId"] = place.subnets[zone]
    elif zone is not None:
        arguments["Placement"] = {"AvailabilityZone": zone}
    if place.security_group_ids:
        arguments["SecurityGroupIds"] = list(place.security_group_ids)
    profile = place.instance_profile
    if is_head(request) and place.head_profile is not None:
        profile = place.head_profile
    if profile is not None:
        arguments["IamInstanceProfile"] = {"Name": profile}
    if request.pool.market is Market.SPOT:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return arguments


def _machine(item: Mapping[str, Any], region: str) -> Machine:
    tags = read_tags({tag["Key"]: tag["Value"] for tag in item.get("Tags", [])})
    return Machine(
        id=item["InstanceId"],
        request_id=tags.request_id,
        pool=Pool(
            region=region,
            zone=item["Placement"]["AvailabilityZone"],
            type=item["InstanceType"],
            market=Market.SPOT if item.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        ),
        state=_STATES[item["State"]["Name"]],
        launched_unix_s=item["LaunchTime"].timestamp(),
        address=item.get("PrivateIpAddress"),
        labels=tags.labels,
        ends_unix_s=tags.ends_unix_s,
        cluster_id=tags.cluster_id,
    )


def _failure_kind(error: CloudError) -> LaunchFailureKind | None:
    """Return the kind of a launch failure; None: machines may have been launched."""
    if error.said in SLOW_DOWN:
        return LaunchFailureKind.THROTTLED
    if isinstance(error, CloudUnreachableError):
        return None
    if error.said in _SOLD_OUT:
        return LaunchFailureKind.SOLD_OUT
    return LaunchFailureKind.QUOTA if error.said in _QUOTA else None


def _is_denied(code: str) -> bool:
    return code in _DENIED
