"""A running lab: namespaces, relay, and the handle by which tests and benchmarks use them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from geo_ray.errors import ConfigError, LabError, LabLateError
from geo_ray.lab import host, namespace, records, requirements, teardown
from geo_ray.lab.client import RelayClient
from geo_ray.lab.compile import compile_plan
from geo_ray.lab.plan import DEVICE, Plan, from_json, ipv4_of, ipv6_of, to_json
from geo_ray.lab.presets import load_topology
from geo_ray.lab.relay import CONTROL_FILE, PLAN_FILE, READY
from geo_ray.lab.stats import CapStats, LabStats, LinkStats
from geo_ray.lab.topology import CapConfig, LinkConfig, Topology

T = TypeVar("T")

LOG_FILE: Final = "relay.log"
_READY_S: Final = 30.0
_DOWN_S: Final = 40.0
_TCP_BUFFERS: Final = "4096 131072 67108864"  # the default's 4 MB would cap long fat links
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])


class Lab:
    """Regions in network namespaces, joined as a topology says. Up on entry, gone after exit.

    Args:
        topology: the configuration, the name of a preset, or the path of a YAML file.
        detached: leave the lab up when this process ends; `close` still takes it down.

    Raises:
        LabUnavailableError: on entry, if root, TUN or a program is lacking.
        ConfigError: the topology is wrong.
        LabError: on entry, if the lab does not come up.
    """

    def __init__(self, topology: Topology | str | Path, *, detached: bool = False) -> None:
        self.topology = topology if isinstance(topology, Topology) else load_topology(topology)
        self._detached = detached
        self._relay: subprocess.Popen[bytes] | None = None
        self.lab_id = ""
        self.directory = Path()
        self._plan: Plan | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Bring the lab up; takes down what crashed labs have left first."""
        requirements.check()
        records.reap()
        self.lab_id, self.directory = records.new_lab()
        try:
            self._plan = plan = compile_plan(self.topology, self.lab_id)
            (self.directory / PLAN_FILE).write_text(to_json(plan))
            self._record(None)
            namespace.ip_batch([f"netns add {s.namespace}" for s in plan.stations])
            self._start_relay()
            self._configure(plan)
        except OSError as error:
            self.close()
            raise LabError(f"the lab does not come up: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything down; may be called again."""
        if not self.lab_id:
            return
        if self._relay is not None:
            if self._relay.stdin is not None:
                self._relay.stdin.close()  # this alone makes the relay take the lab down
            if self._detached:
                with contextlib.suppress(LabError):
                    self._client.ask("quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._relay.wait(_DOWN_S)
        teardown.take_down(self.directory)
        if self._relay is not None and self._relay.poll() is None:
            self._relay.wait(_DOWN_S)
        self._relay, self.lab_id = None, ""

    @classmethod
    def attach(cls, lab_id: str | None = None) -> Lab:
        """The handle of a lab that another process has brought up; leaving it changes nothing.

        Args:
            lab_id: which; None means the only one there is.

        Raises:
            LabUnknownError: there is no such lab, or there are several.
        """
        found = records.find(lab_id)
        directory = records.BASE / found
        record = teardown.read_record(directory)
        lab = cls(Topology.model_validate_json(record["topology"]))
        lab.lab_id, lab.directory = found, directory
        lab._plan = from_json((directory / PLAN_FILE).read_text())
        return lab

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
        if not requirements.has_ipv6():
            return {}
        return {name: ipv6_of(index) for index, name in enumerate(self.regions)}

    def namespace_of(self, region: str) -> str:
        """Name of a region's network namespace.

        Raises:
            ConfigError: there is no such region.
        """
        if region not in self.regions:
            raise ConfigError(f"the lab has no region '{region}', but {', '.join(self.regions)}")
        return self._running_plan.stations[self.regions.index(region)].namespace

    def argv_in(self, region: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` inside a region; its pid becomes that of ``argv``."""
        # not `ip netns exec`: that hides cgroups from Ray by mounting /sys anew
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
        """Call ``action`` in a thread inside a region: sockets that it makes belong there."""
        return namespace.inside(self.namespace_of(region), action)

    def congestion_control(self, region: str) -> str:
        """The congestion control that the region's kernel uses, asked of the kernel."""
        return namespace.read_setting(self.namespace_of(region), "ipv4/tcp_congestion_control")

    # ------------------------------------------------------------------ links

    def set(self, src: str, dst: str, **changes: Any) -> None:
        """Change a direction; what is not named stays. A rate that is set ends its trace.

        Args:
            src: sending region, or ``*`` for all.
            dst: receiving region, or ``*`` for all.
            changes: keys of `geo_ray.lab.topology.LinkConfig`.

        Raises:
            ConfigError: a key, a value or a region is wrong.
        """
        LinkConfig.model_validate(changes)
        self._client.ask("set", src=src, dst=dst, changes=changes)

    def cap(
        self, region: str, *, up: CapConfig | None = None, down: CapConfig | None = None
    ) -> None:
        """Change a region's own line; a trace of it ends.

        Args:
            region: which.
            up: rate and queue towards the others; None leaves it.
            down: the same from the others.
        """
        sides = {
            side: {"rate_mbps": config.rate_mbps, "queue_bytes": config.queue_bytes}
            for side, config in (("up", up), ("down", down))
            if config is not None
        }
        self._client.ask("cap", region=region, **sides)

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Lose all that is under way or comes from now on; ``one_way``: only from a to b."""
        self._both("cut", a, b, one_way)

    def heal(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Carry packets again; ``one_way``: only from a to b."""
        self._both("heal", a, b, one_way)

    def restart_traces(self) -> None:
        """Let every trace begin anew, now."""
        self._client.ask("restart_traces")

    # ------------------------------------------------------------------ books

    def reset(self) -> None:
        """Begin all counters anew."""
        self._client.ask("reset")

    def stats(self) -> LabStats:
        """What the relay has counted since the start or `reset`, and the congestion controls."""
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
            The books on which that rests.

        Raises:
            LabLateError: more than 5 % of the packets were over 1 ms late.
        """
        stats = self.stats()
        if stats.was_late:
            raise LabLateError(
                f"the relay was late by more than 1 ms for {stats.late_share:.1%} of the packets "
                f"(used {stats.cpu_share:.0%} of a core)"
            )
        return stats

    # ------------------------------------------------------------------ inside

    @property
    def _client(self) -> RelayClient:
        if not self.lab_id:
            raise LabError("the lab is not up", fix="Use `with Lab(...)`.")
        return RelayClient(self.directory / CONTROL_FILE)

    @property
    def _running_plan(self) -> Plan:
        if self._plan is None:
            raise LabError("the lab is not up", fix="Use `with Lab(...)`.")
        return self._plan

    def _both(self, do: str, a: str, b: str, one_way: bool) -> None:
        self._client.ask(do, src=a, dst=b)
        if not one_way:
            self._client.ask(do, src=b, dst=a)

    def _record(self, relay_pid: int | None) -> None:
        plan = self._running_plan
        record = {
            "lab_id": self.lab_id,
            "name": self.topology.name,
            "topology": self.topology.model_dump_json(),
            "namespaces": [station.namespace for station in plan.stations],
            "owner": _named(os.getpid()),
            "relay": None if relay_pid is None else _named(relay_pid),
            "began_unix_s": time.time(),
        }
        teardown.write_record(self.directory, record)

    def _start_relay(self) -> None:
        argv = [sys.executable, "-S", "-m", "geo_ray.lab.relay", str(self.directory)]
        with (self.directory / LOG_FILE).open("wb") as log:
            self._relay = relay = subprocess.Popen(
                [*argv, "--detached"] if self._detached else argv,
                stdin=subprocess.DEVNULL if self._detached else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PYTHONPATH": _PACKAGE_PARENT, "PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        self._record(relay.pid)
        assert relay.stdout is not None  # noqa: S101
        with relay.stdout as stream:
            said = b""
            if select.select([stream], [], [], _READY_S)[0]:
                said = os.read(stream.fileno(), len(READY))
        if said != READY:
            relay.kill()
            relay.wait()
            log_path = self.directory / LOG_FILE
            lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
            raise LabError(f"the relay did not start: {' | '.join(lines[-3:]) or 'no answer'}")

    def _configure(self, plan: Plan) -> None:
        wanted = {station.congestion_control for station in plan.stations}
        with host.allowed(wanted):
            for station in plan.stations:
                namespace.write_settings(
                    station.namespace,
                    {
                        "ipv4/tcp_congestion_control": station.congestion_control,
                        "ipv4/tcp_wmem": _TCP_BUFFERS,
                        "ipv4/tcp_rmem": _TCP_BUFFERS,
                        "ipv4/tcp_no_metrics_save": "1",  # a connection learns nothing from others
                    },
                )
        for index, station in enumerate(plan.stations):
            lines = [
                "link set lo up",
                f"addr add {ipv4_of(index)}/32 dev {DEVICE}",
                f"link set {DEVICE} mtu {plan.mtu} txqueuelen 20000 up",
                f"route replace default dev {DEVICE} src {ipv4_of(index)}",
            ]
            if requirements.has_ipv6():
                lines += [
                    f"addr add {ipv6_of(index)}/128 dev {DEVICE} nodad",
                    f"route replace ::/0 dev {DEVICE} src {ipv6_of(index)}",
                ]
            namespace.ip_batch(lines, station.namespace)


def _named(pid: int) -> list[int] | None:
    start = teardown.started_at(pid)
    return None if start is None else [pid, start]
