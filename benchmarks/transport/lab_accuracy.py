"""How true the WAN lab is: what is set against what real TCP and UDP see. Needs root.

  goodput   one TCP flow over 100 Mbit/s and 50 ms one way, CUBIC and BBR, after slow start;
            against the limit, rate x 1448/1500 (the rate counts IP bytes, TCP with timestamps)
  delay     UDP probes by one clock, on an idle link and beside 80 Mbit/s of UDP: mean, median and
            99th percentile of what is added to 50 ms and the packet's own serialisation
  loss      lost of 40,000 packets, over what is set
  load      share of one core that the relay uses, what its writes cost the receiving TCP included:
            one flow of 100 Mbit/s; 200 Mbit/s both ways; nine regions that send 20 Mbit/s each, a
            flow to each of the eight others
  late      share of late packets (docs/guides/wan-lab.md has the rule), the worst of goodput and
            load
  stolen    the same flow of 100 Mbit/s, the relay kept on one core, while processes of a higher
            priority take about 8 % of every core, in turns of 2.5 ms on average, as a host does
            that runs others: share of late packets and mean lateness over what is allowed, by round
            trip. Up to 50 ms the bound is 1 ms, which once held for all links. The kernel counts
            this time as run queue; that of a real host it counts as stolen.

The relay's lateness is reported, not used to reject, because it is what is measured here. What the
kernel counted beside each run is under `lab_runs`.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common import support
from geo_ray.lab import records
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.teardown import read_record
from geo_ray.lab.topology import CapConfig, DefaultLink, LabRegionConfig, Topology

RATE_MBPS, DELAY_S = 100.0, 0.05
GOODPUT_SHARE = 1448 / 1500
PACKET_BYTES, HEADS_BYTES = 1500, 28
CHUNK = bytes(1 << 18)
SO_TIMESTAMPNS = 35
END = b"end"


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    warm_s, measure_s = (3.0, 3.0) if options.quick else (4.0, 10.0)
    figures: list[support.Figure] = []
    late: dict[str, LabStats] = {}
    for control in ("cubic", "bbr"):
        support.say(f"goodput with {control}")
        reached_mbps, stats = one_flow(control, warm_s, measure_s)
        share = reached_mbps / (RATE_MBPS * GOODPUT_SHARE)
        # every 10 s BBR sends next to nothing for 0.2 s, to see the path's delay
        target = ">= 0.97" if control == "cubic" else ">= 0.95"
        figures.append(support.Figure(f"goodput {control}", share, "of limit", target))
        figures.append(support.Figure(f"relay, {control} 100 one way", stats.cpu_fraction, "core"))
        late[f"{control} 100 one way"] = stats
    figures += delay_figures(300 if options.quick else 1500)
    figures += loss_figures(options.quick)
    for name, stats in loads(warm_s, measure_s):
        figures.append(support.Figure(f"relay, {name}", stats.cpu_fraction, "core", "<= 0.7"))
        late[name] = stats
    worst = max(stats.late_fraction for stats in late.values())
    for trip_ms in (20, 100) if options.quick else (20, 100, 200, 400):
        found = beside_thieves(trip_ms / 1e3, warm_s, measure_s)
        late[f"stolen, {trip_ms} ms"] = found
        over = found.verdict.mean_over_bound
        figures += [
            support.Figure(f"stolen, {trip_ms} ms, late", found.late_fraction, "share"),
            support.Figure(f"stolen, {trip_ms} ms, mean over bound", over, "ratio"),
        ]
    figures.append(support.Figure("late packets, worst run", worst, "share", "<= 0.05"))
    runs = [{"name": name, "lab": stats.record()} for name, stats in late.items()]
    for name, stats in late.items():
        support.say(f"{name}: late {stats.late_fraction:.1%}; {stats.relay}")
    support.finish("lab_accuracy", machine, figures, options.out, runs)


def topology(count: int, link: DefaultLink, control: str, cap: CapConfig | None = None) -> Topology:
    return Topology(
        congestion_control=control,  # type: ignore[arg-type]
        link=link,
        up=cap or CapConfig(),
        down=cap or CapConfig(),
        regions=tuple(LabRegionConfig(name=f"r{index}") for index in range(count)),
    )


# ------------------------------------------------------------------ goodput and load


class Flow:
    """One TCP connection that is kept full; `received` counts at its far end."""

    def __init__(self, lab: Lab, src: str, dst: str) -> None:
        self.received = 0

        def listen() -> socket.socket:
            return socket.create_server((lab.addresses[dst], 0))

        with lab.inside(dst, listen) as listener:
            address = listener.getsockname()
            self._near = lab.inside(src, lambda: socket.create_connection(address, 30.0))
            self._far, _ = listener.accept()
        self._threads = [threading.Thread(target=run) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the connection."""
        for end in (self._near, self._far):
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._near.close()
        self._far.close()

    def _send(self) -> None:
        try:
            while True:
                self._near.sendall(CHUNK)
        except OSError:
            return

    def _receive(self) -> None:
        buffer = bytearray(1 << 18)
        try:
            while size := self._far.recv_into(buffer):
                self.received += size
        except OSError:
            return


@contextmanager
def flows_of(lab: Lab, pairs: list[tuple[str, str]]) -> Iterator[list[Flow]]:
    flows: list[Flow] = []
    try:
        for src, dst in pairs:
            flows.append(Flow(lab, src, dst))
        yield flows
    finally:
        for flow in flows:
            flow.close()


def measured(
    lab: Lab, pairs: list[tuple[str, str]], warm_s: float, measure_s: float
) -> tuple[list[float], LabStats]:
    """Mbit/s of each flow, and the relay's books over the same time."""
    with flows_of(lab, pairs) as flows:
        time.sleep(warm_s)
        lab.reset()
        began_s, before = time.monotonic(), [flow.received for flow in flows]
        time.sleep(measure_s)
        spent_s, after = time.monotonic() - began_s, [flow.received for flow in flows]
        stats = lab.stats()
    rates = [(b - a) * 8e-6 / spent_s for a, b in zip(before, after, strict=True)]
    return rates, stats


def one_flow(control: str, warm_s: float, measure_s: float) -> tuple[float, LabStats]:
    link = DefaultLink(rate_mbps=RATE_MBPS, delay_s=DELAY_S)
    with Lab(topology(2, link, control)) as lab:
        rates, stats = measured(lab, [("r0", "r1")], warm_s, measure_s)
    support.say(f"{rates[0]:.2f} Mbit/s, TCP {stats.congestion_control['r0']}")
    return rates[0], stats


def loads(warm_s: float, measure_s: float) -> Iterator[tuple[str, LabStats]]:
    support.say("200 Mbit/s both ways")
    link = DefaultLink(rate_mbps=200.0, delay_s=DELAY_S)
    with Lab(topology(2, link, "bbr")) as lab:
        rates, stats = measured(lab, [("r0", "r1"), ("r1", "r0")], warm_s, measure_s)
    support.say("reached " + ", ".join(f"{rate:.0f}" for rate in rates))
    yield "200 both ways", stats
    support.say("nine regions, 20 Mbit/s each")
    cap = CapConfig(rate_mbps=20.0)
    with Lab(topology(9, DefaultLink(delay_s=0.02), "cubic", cap)) as lab:
        pairs = [(src, dst) for src in lab.regions for dst in lab.regions if src != dst]
        rates, stats = measured(lab, pairs, warm_s, measure_s)
    support.say(f"reached {sum(rates):.0f} in all")
    yield "nine regions of 20", stats


# ------------------------------------------------------------------ stolen time


THIEF = """
import os, random, sys, time
core, priority, every_s, turn_s = int(sys.argv[1]), 60, 0.03, 0.0025
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
draw = random.Random(core)
while True:
    time.sleep(draw.expovariate(1 / every_s))
    until_s = time.monotonic() + draw.expovariate(1 / turn_s)
    while time.monotonic() < until_s:
        pass
"""


def beside_thieves(round_trip_s: float, warm_s: float, measure_s: float) -> LabStats:
    """One CUBIC flow on a machine whose cores are taken away for milliseconds, again and again."""
    support.say(f"cores are stolen, {round_trip_s * 1e3:g} ms")
    link = DefaultLink(rate_mbps=RATE_MBPS, delay_s=round_trip_s / 2)
    thieves: list[subprocess.Popen[bytes]] = []
    try:
        with Lab(topology(2, link, "cubic")) as lab:
            cores = sorted(os.sched_getaffinity(0))
            # a guest whose core is taken away does not know, and moves nothing to another
            os.sched_setaffinity(read_record(records.BASE / lab.lab_id)["relay"][0], cores[:1])
            for core in cores:
                thieves.append(subprocess.Popen([sys.executable, "-S", "-c", THIEF, str(core)]))
            return measured(lab, [("r0", "r1")], warm_s, measure_s)[1]
    finally:
        for thief in thieves:
            thief.kill()
            thief.wait()


# ------------------------------------------------------------------ delay and loss


class Probes:
    """UDP packets that carry when they were sent, from r0 to r1."""

    def __init__(self, lab: Lab) -> None:
        self.delays_s: list[float] = []
        self._lab = lab
        self._near, self._far = self._socket("r0"), self._socket("r1")
        self._address = self._far.getsockname()
        self._near.connect(self._address)
        self._reader = threading.Thread(target=self._receive)
        self._reader.start()

    def send(self, sized: int) -> None:
        """Send one packet of this size, heads included."""
        self._near.send(struct.pack("q", time.time_ns()).ljust(sized - HEADS_BYTES, b"\0"))

    def close(self) -> None:
        """Wait for what is under way; then the end marker, which must not be lost."""
        self._lab.set("r0", "r1", loss=0.0)
        while self._lab.stats().links["r0", "r1"].waiting:
            time.sleep(0.05)
        self._near.send(END)
        self._reader.join()
        self._near.close()
        self._far.close()

    def _socket(self, region: str) -> socket.socket:
        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            made.bind((self._lab.addresses[region], 0))
            return made

        return self._lab.inside(region, make)

    def _receive(self) -> None:
        # stamped by the kernel: how soon this thread is woken is not the lab's doing
        while len((got := self._far.recvmsg(2048, 64))[0]) > len(END):
            seconds, nanoseconds = struct.unpack("qq", got[1][0][2])
            (sent_ns,) = struct.unpack_from("q", got[0])
            self.delays_s.append((seconds * 10**9 + nanoseconds - sent_ns) / 1e9)


@contextmanager
def probes_of(link: DefaultLink) -> Iterator[tuple[Lab, Probes]]:
    with Lab(topology(2, link, "cubic")) as lab:
        probes = Probes(lab)
        try:
            yield lab, probes
        finally:
            probes.close()


def delay_figures(count: int) -> list[support.Figure]:
    figures = []
    link = DefaultLink(rate_mbps=RATE_MBPS, delay_s=DELAY_S)
    ideal_s = DELAY_S + PACKET_BYTES * 8e-6 / RATE_MBPS
    for name, load_mbps in (("idle", 0.0), ("80 Mbit/s", 80.0)):
        support.say(f"delay, {name}")
        with probes_of(link) as (lab, probes):
            for _ in range(count):
                until_s = time.monotonic() + 0.005
                probes.send(PACKET_BYTES)
                if load_mbps:  # probes among their like: the load is measured as well
                    for _ in range(int(load_mbps * 1e6 * 0.005 / 8 / PACKET_BYTES)):
                        probes.send(PACKET_BYTES)
                time.sleep(max(0.0, until_s - time.monotonic()))
            lab.reset()
        # the packets of one burst wait for each other; the first of each burst shows the link
        per_burst = 1 + int(load_mbps * 1e6 * 0.005 / 8 / PACKET_BYTES)
        errors_ms = [(d - ideal_s) * 1e3 for d in probes.delays_s[::per_burst]]
        mean = statistics.mean(errors_ms)
        centiles = statistics.quantiles(errors_ms, n=100)
        figures.append(support.Figure(f"delay error, {name}, mean", mean, "ms", "<= 1.5"))
        figures.append(support.Figure(f"delay error, {name}, median", centiles[49], "ms"))
        figures.append(support.Figure(f"delay error, {name}, p99", centiles[98], "ms"))
    return figures


def loss_figures(quick: bool) -> list[support.Figure]:
    figures = []
    for percent in (1.0,) if quick else (0.1, 1.0, 2.0):
        support.say(f"loss {percent} %")
        with probes_of(DefaultLink(delay_s=0.001, loss=percent / 100)) as (lab, probes):
            for number in range(40_000):
                probes.send(200)
                if number % 20 == 0:
                    time.sleep(0.001)
            while lab.stats().links["r0", "r1"].waiting:
                time.sleep(0.05)
            books = lab.stats().links["r0", "r1"]
        seen = books.lost / books.in_packets * 100
        figures.append(support.Figure(f"loss, set {percent:g} %", seen, "%"))
    return figures


if __name__ == "__main__":
    main()
