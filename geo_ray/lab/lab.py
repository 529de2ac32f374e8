"""A running lab: requirements, creation of its regions, and the handle for tests and the CLI.

`start_ray` starts a Ray cluster in it: one node per region, in its namespace, with the region's
label; the first region's node is the head. All traffic between nodes crosses the lab's links.

Creating a region needs one host setting, the list of allowed congestion controls, which is changed
for milliseconds and under a lock.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pydantic import ValidationError

from geo_ray.base.errors import (
    ClusterStartError,
    ConfigError,
    LabError,
    LabLateError,
    LabUnavailableError,
)
from geo_ray.base.explain import explain
from geo_ray.lab import namespace, records, teardown
from geo_ray.lab.namespace import TUN_FILE
from geo_ray.lab.plan import DEVICE, LabPlan, from_json, ipv4_of, ipv6_of, to_json
from geo_ray.lab.records import locked
from geo_ray.lab.relay import CONTROL_FILE, PLAN_FILE
from geo_ray.lab.relay_client import RelayClient, RelayProcess
from geo_ray.lab.stats import CapStats, LabStats, LinkStats
from geo_ray.lab.topology import CapConfig, LinkConfig, Topology, compile_plan, load_topology
from geo_ray.ray_cluster.labels import label_flag

_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux"}


def missing_requirements() -> str | None:
    """Return why this machine or user cannot have a lab; None if they can."""
    if not sys.platform.startswith("linux"):
        return "the WAN lab needs Linux"
    if os.geteuid() != 0:
        return "the WAN lab needs root: it makes network namespaces and TUN devices"
    try:
        os.close(os.open(TUN_FILE, os.O_RDWR))
    except OSError as error:
        return f"the WAN lab needs {TUN_FILE}: {error.strerror}"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"the WAN lab needs the program `{program}` (package {package})"
    return None


def check_requirements() -> None:
    """Check the requirements.

    Raises:
        LabUnavailableError: something is missing, which the message names.
    """
    reason = missing_requirements()
    if reason is not None:
        raise LabUnavailableError(reason)


def has_ipv6() -> bool:
    """Return whether this kernel has IPv6."""
    return Path("/proc/sys/net/ipv6").is_dir()


_TCP = Path("/proc/sys/net/ipv4")
_ALLOWED = _TCP / "tcp_allowed_congestion_control"
_AVAILABLE = _TCP / "tcp_available_congestion_control"


@contextmanager
def allow_congestion_controls(wanted: Iterable[str]) -> Iterator[None]:
    """Let namespaces choose these congestion controls while the block runs.

    A namespace may only choose what the host's ``tcp_allowed_congestion_control`` names; once
    chosen it stays chosen, so the host's list is put back at once.

    Raises:
        LabUnavailableError: the kernel has none of that name.
    """
    needed = set(wanted)
    with locked():
        before = _ALLOWED.read_text().split()
        missing = needed - set(_AVAILABLE.read_text().split())
        if missing:
            raise LabUnavailableError(
                f"the kernel lacks the congestion control {', '.join(sorted(missing))}",
                fix="Load it (`modprobe tcp_bbr`), or choose another `congestion_control`.",
            )
        added = needed - set(before)
        if added:
            _ALLOWED.write_text(" ".join([*before, *sorted(added)]))
        try:
            yield
        finally:
            if added:
                _ALLOWED.write_text(" ".join(before))


_TCP_BUFFERS: Final = "4096 131072 67108864"  # the usual 4 MB would limit long links
_DEVICE_QUEUE: Final = 20_000  # packets; only links may drop packets, never the device


def make_namespaces(plan: LabPlan) -> None:
    """Make the namespaces of all regions.

    Raises:
        OSError: the system refuses.
    """
    namespace.ip_batch([f"netns add {station.namespace}" for station in plan.stations])


def configure_namespaces(plan: LabPlan) -> None:
    """Set addresses, routes and TCP of all regions; their devices must exist.

    Raises:
        OSError: the system refuses.
        LabUnavailableError: the kernel lacks a congestion control.
    """
    with allow_congestion_controls({station.congestion_control for station in plan.stations}):
        for station in plan.stations:
            namespace.write_settings(
                station.namespace,
                {
                    "ipv4/tcp_congestion_control": station.congestion_control,
                    "ipv4/tcp_wmem": _TCP_BUFFERS,
                    "ipv4/tcp_rmem": _TCP_BUFFERS,
                    "ipv4/tcp_no_metrics_save": "1",  # no connection learns from earlier ones
                },
            )
    for index, station in enumerate(plan.stations):
        lines = [
            "link set lo up",
            f"addr add {ipv4_of(index)}/32 dev {DEVICE}",
            f"link set {DEVICE} mtu {plan.mtu} txqueuelen {_DEVICE_QUEUE} up",
            f"route replace default dev {DEVICE} src {ipv4_of(index)}",
        ]
        if has_ipv6():
            lines += [
                f"addr add {ipv6_of(index)}/128 dev {DEVICE} nodad",
                f"route replace ::/0 dev {DEVICE} src {ipv6_of(index)}",
            ]
        namespace.ip_batch(lines, station.namespace)


def congestion_control_of(name: str) -> str:
    """Return the congestion control that the kernel uses in a namespace."""
    return namespace.read_setting(name, "ipv4/tcp_congestion_control")


T = TypeVar("T")


class Lab:
    """Regions in network namespaces, joined as a topology says; up on entry, removed on exit.

    Args:
        topology: the configuration, the name of a preset, or the path of a YAML file.
        detached: leave the lab up when this process ends, or the block is left.

    Raises:
        LabUnavailableError: on entry, if root, TUN or a program is missing.
        ConfigError: the topology is wrong.
        LabError: on entry, if the lab does not come up.
    """

    def __init__(self, topology: Topology | str | Path, *, detached: bool = False) -> None:
        self.topology = topology if isinstance(topology, Topology) else load_topology(topology)
        self.lab_id = ""
        self.directory = Path()
        self._detached = detached
        self._relay: RelayProcess | None = None
        self._plan: LabPlan | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._detached:
            self.close()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Take down what crashed labs have left, then bring the lab up."""
        check_requirements()
        records.reap()
        self.lab_id, self.directory = records.new_lab()
        try:
            self._plan = plan = compile_plan(self.topology, self.lab_id)
            (self.directory / PLAN_FILE).write_text(to_json(plan))
            self._record(plan)
            make_namespaces(plan)
            self._relay = RelayProcess(self.directory, detached=self._detached)
            self._record(plan)
            self._relay.wait_ready()
            configure_namespaces(plan)
        except OSError as error:
            self.close()
            raise LabError(f"the lab does not come up: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the lab down, detached or not; may be called again."""
        if not self.lab_id:
            return
        if self._relay is not None:
            self._relay.release()
        records.down(self.lab_id)
        if self._relay is not None:
            self._relay.wait()
        self._relay, self.lab_id = None, ""

    @classmethod
    def attach(cls, lab_id: str | None = None) -> Lab:
        """Return the handle of a lab that another process has brought up.

        Args:
            lab_id: id of the lab; None means the only one there is.

        Raises:
            LabUnknownError: there is no such lab, or there are several.
        """
        found = records.find(lab_id)
        directory = records.BASE / found
        record = teardown.read_record(directory)
        lab = cls(Topology.model_validate_json(record["topology"]), detached=True)
        lab.lab_id, lab.directory = found, directory
        lab._plan = from_json((directory / PLAN_FILE).read_text())
        return lab

    def wait(self, longest_s: float | None = None) -> bool:
        """Wait until another process has taken the lab down; False if none has by then."""
        return self._relay is None or self._relay.wait(longest_s)

    # ------------------------------------------------------------------ regions

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return self.topology.region_names

    @property
    def addresses(self) -> dict[str, str]:
        """IPv4 address of every region."""
        return {name: ipv4_of(index) for index, name in enumerate(self.regions)}

    @property
    def addresses6(self) -> dict[str, str]:
        """IPv6 address of every region; empty if the kernel has no IPv6."""
        if not has_ipv6():
            return {}
        return {name: ipv6_of(index) for index, name in enumerate(self.regions)}

    def namespace_of(self, region: str) -> str:
        """Name of a region's network namespace.

        Raises:
            ConfigError: there is no such region.
            LabError: the lab is not up.
        """
        if self._plan is None:
            raise LabError("the lab is not up", fix="Use `with Lab(...)`.")
        if region not in self.regions:
            raise ConfigError(
                f"the lab has no region '{region}'", fix=f"Name one of {', '.join(self.regions)}."
            )
        return self._plan.stations[self.regions.index(region)].namespace

    def argv_in(self, region: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` inside a region, with the same pid."""
        # not `ip netns exec`: it mounts another /sys, which hides cgroups from Ray
        path = namespace.path_of(self.namespace_of(region))
        return ["nsenter", f"--net={path}", "--", *argv]

    def popen(self, region: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program inside a region; it is ended with the lab.

        Args:
            region: where.
            argv: program and arguments.
            options: those of `subprocess.Popen`.
        """
        return subprocess.Popen(self.argv_in(region, argv), **options)

    def inside(self, region: str, action: Callable[[], T]) -> T:
        """Call ``action`` in a thread inside a region, to which its sockets then belong."""
        return namespace.inside(self.namespace_of(region), action)

    def congestion_control(self, region: str) -> str:
        """Return the congestion control of a region, as its kernel reports it."""
        return congestion_control_of(self.namespace_of(region))

    # ------------------------------------------------------------------ links

    def set(self, src: str, dst: str, **changes: Any) -> None:
        """Change a direction; other keys stay. A rate that is set ends its trace.

        Args:
            src: sending region, or ``*`` for all.
            dst: receiving region, or ``*`` for all.
            changes: keys of `geo_ray.lab.topology.LinkConfig`.

        Raises:
            ConfigError: a key, a value or a region is wrong.
        """
        try:
            checked = LinkConfig.model_validate(changes).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise ConfigError(
                "; ".join(explain(error, LinkConfig, {})),
                fix=(
                    "Correct what the message names; docs/guides/wan-lab.md lists the keys of a "
                    "link."
                ),
            ) from error
        self._client.ask("set", src=src, dst=dst, changes=checked)

    def cap(
        self, region: str, *, up: CapConfig | None = None, down: CapConfig | None = None
    ) -> None:
        """Change a region's own line and end its trace.

        Args:
            region: name of the region.
            up: rate and queue towards the others; None leaves it.
            down: rate and queue from the others; None leaves it.
        """
        sides = {
            side: {"rate_mbps": config.rate_mbps, "queue_bytes": config.queue_bytes}
            for side, config in (("up", up), ("down", down))
            if config is not None
        }
        self._client.ask("cap", region=region, **sides)

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Drop all packets in transit or sent from now on; ``one_way``: only from a to b."""
        self._both("cut", a, b, one_way)

    def heal(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Deliver packets again after `cut`; ``one_way``: only from a to b."""
        self._both("heal", a, b, one_way)

    def restart_traces(self) -> None:
        """Restart every trace now."""
        self._client.ask("restart_traces")

    # ------------------------------------------------------------------ counters

    def reset(self) -> None:
        """Reset all counters."""
        self._client.ask("reset")

    def stats(self) -> LabStats:
        """Return the relay's counters since the start or `reset`, and the congestion controls."""
        totals = self._client.ask("totals")
        links: dict[tuple[str, str], LinkStats] = {}
        up, down, unrouted = {}, {}, 0
        for src in self.regions:
            answer = self._client.ask("stats", src=src)
            links |= {(src, dst): LinkStats(**books) for dst, books in answer["links"].items()}
            up[src], down[src] = CapStats(**answer["up"]), CapStats(**answer["down"])
            unrouted += answer["unrouted"]
        return LabStats(
            **{key: totals[key] for key in totals.keys() - {"ok"}},
            unrouted=unrouted,
            links=links,
            up=up,
            down=down,
            congestion_control={name: self.congestion_control(name) for name in self.regions},
        )

    def check_not_late(self) -> LabStats:
        """Refuse figures that were taken while the relay could not keep time.

        Returns:
            The counters of that time.

        Raises:
            LabLateError: `geo_ray.lab.stats` says that they do not count.
        """
        stats = self.stats()
        if stats.was_late:
            raise LabLateError("; ".join([*stats.verdict.why, str(stats.relay)]))
        return stats

    # ------------------------------------------------------------------ inside

    @property
    def _client(self) -> RelayClient:
        if not self.lab_id:
            raise LabError("the lab is not up", fix="Use `with Lab(...)`.")
        return RelayClient(self.directory / CONTROL_FILE)

    def _both(self, do: str, a: str, b: str, one_way: bool) -> None:
        self._client.ask(do, src=a, dst=b)
        if not one_way:
            self._client.ask(do, src=b, dst=a)

    def _record(self, plan: LabPlan) -> None:
        record = {
            "lab_id": self.lab_id,
            "name": self.topology.name,
            "topology": self.topology.model_dump_json(),
            "namespaces": [station.namespace for station in plan.stations],
            "owner": teardown.named(os.getpid()),
            "relay": None if self._relay is None else teardown.named(self._relay.pid),
            "began_unix_s": time.time(),
        }
        teardown.write_record(self.directory, record)


_PORT: Final = 6379  # every region has all ports of its namespace
_TAIL_LINES: Final = 15

WAN_SETTINGS: Final[Mapping[str, str]] = {
    # An object that needs longer than the default of 10 s to arrive would be sent twice.
    "RAY_object_manager_pull_timeout_ms": "300000",
    # Ray's own defaults: a node that is partitioned for less than a minute is not given up.
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass(frozen=True)
class RayOptions:
    """The size of the nodes.

    Attributes:
        cpus: logical CPUs of each region; only a count.
        object_store_bytes: shared memory of each region's object store.
        start_timeout_s: longest wait for all nodes; starting crosses the WAN several times.
        tls: whether Ray encrypts its traffic, with a certificate of the lab.
    """

    cpus: int = 4
    object_store_bytes: int = 100_000_000
    start_timeout_s: float = 180.0
    tls: bool = False


def start_ray(lab: Lab, options: RayOptions | None = None) -> dict[str, str]:
    """Start a Ray node in every region; the nodes end with the lab.

    Args:
        lab: must be up, without a Ray cluster so far.
        options: sizes.

    Returns:
        Environment of a driver inside a region, including RAY_ADDRESS.

    Raises:
        ClusterStartError: a node does not start; nodes that have started stay until the lab ends.
    """
    from geo_ray.ray_cluster.settings import (  # imports Ray, which takes seconds
        local_node_environment,
        tls_environment,
        token_environment,
    )

    options = options or RayOptions()
    record = teardown.read_record(lab.directory)
    if "ray" in record:
        raise ClusterStartError(
            "this lab has a Ray cluster already", fix="Take the lab down and bring it up again."
        )
    root = Path(tempfile.mkdtemp(prefix="geo-ray-lab-"))
    token = root / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    head_ip = lab.addresses[lab.regions[0]]
    environment = {"RAY_ADDRESS": f"{head_ip}:{_PORT}", **token_environment(token)}
    tls = tls_environment(root, tuple(lab.addresses.values())) if options.tls else {}
    environment |= tls
    record["directories"] = [*record.get("directories", []), str(root)]
    teardown.write_record(lab.directory, record)

    node_environment = {**local_node_environment(token), **WAN_SETTINGS, **tls}
    deadline_s = time.monotonic() + options.start_timeout_s
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    for index, region in enumerate(lab.regions):
        home = root / str(index)
        home.mkdir()
        with (root / f"{index}.log").open("wb") as log:
            nodes[region] = lab.popen(
                region,
                _node_argv(region, index, lab.addresses[region], home, head_ip, options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=node_environment,
                start_new_session=True,
            )
        if index == 0:  # no other node can start without the head
            _wait_for_nodes(nodes, root, deadline_s)
    _wait_for_nodes(nodes, root, deadline_s)
    record["ray"] = environment
    teardown.write_record(lab.directory, record)
    return environment


def environment_of(lab: Lab) -> dict[str, str]:
    """Return the variables by which a driver finds the lab's Ray cluster; empty if it has none."""
    found: dict[str, str] = teardown.read_record(lab.directory).get("ray", {})
    return found


def _node_argv(
    region: str, index: int, address: str, home: Path, head_ip: str, options: RayOptions
) -> list[str]:
    if index == 0:
        role = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
    else:
        role = [f"--address={head_ip}:{_PORT}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        f"--node-ip-address={address}",
        f"--labels={label_flag(region)}",
        f"--num-cpus={options.cpus}",
        "--num-gpus=0",
        f"--temp-dir={home}",
        f"--object-store-memory={options.object_store_bytes}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def _wait_for_nodes(
    nodes: Mapping[str, subprocess.Popen[bytes]], root: Path, deadline_s: float
) -> None:
    for index, (region, process) in enumerate(nodes.items()):
        while not (root / str(index) / "ray_current_cluster").is_file():
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = (root / f"{index}.log").read_text(errors="replace").splitlines()
                why = (
                    "ended while it started" if process.poll() is not None else "was not up in time"
                )
                raise ClusterStartError(
                    f"the Ray node of region '{region}' {why}:\n  "
                    + "\n  ".join(lines[-_TAIL_LINES:])
                )
            time.sleep(0.05)
