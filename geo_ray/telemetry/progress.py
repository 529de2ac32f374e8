"""Progress display of a job: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text, TextType

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, coarse_text, counted, metrics_text, number_text, printable
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.status import RegionNow, RunNow

REDRAWS_PER_S = 4.0
PLAIN_LINE_EVERY_S = 2.0
PLAIN_WAIT_EVERY_S = 4.0
_SHARE = 0.2
_TICK_S = 0.5
_LONG_S = 3.0  # start-up phases that take longer show their time
_NAMED = 3  # maximum number of listed names
_HEADINGS = (
    *("region", "step", "newest loss", "samples/s"),
    *("Mb/s out", "in", "stale", "wait", "state"),
)
_LEFT_OUT = ("in", "Mb/s out", "stale", "wait", "samples/s")  # on narrow terminals, in this order
_TOLD = (
    "worker_lost",
    "worker_replaced",
    "bridge_replaced",
    "run_actor_attached",
    "worker_left",
    "active_workers",
    "step_refused",
    "state_changed",
    "region_joined",
    "region_drained",
    "averager_moved",
    "standby_ready",
    "server_replaced",
    "server_standby_ready",
    "server_standby_lost",
    "run_resumed",
    "stop_requested",
    "checkpoint",
    "checkpoint_failed",
)
_STATE_CHANGES = {  # by `how`: description and effect
    "changed": ("undeclared state changes", "it is not exchanged and not saved"),
    "unfrozen": ("unfrozen but not trained", "the trained parameters were fixed at the start"),
    "frozen": ("frozen but still trained", "weight decay and momentum still change it"),
}


@dataclass(frozen=True, slots=True)
class _Wait:
    """Progress of a start-up phase.

    Attributes:
        phase: description of the phase.
        since_s: start of the phase, on the display's clock.
        done: number of ready items.
        total: number of items.
        names: names of the items that are not ready.
    """

    phase: str
    since_s: float
    done: int
    total: int
    names: tuple[str, ...]

    def text(self, now_s: float) -> str:
        """Give ``starting processes: 3 of 10 ready, awaiting eu/1, us/0 (12 s)``."""
        named = ", ".join(self.names[:_NAMED])
        if len(self.names) > _NAMED:
            named += f" and {len(self.names) - _NAMED} more"
        took = coarse_text(now_s - self.since_s)
        return f"{self.phase}: {self.done} of {self.total} ready, awaiting {named} ({took})"


class Progress:
    """Shows a run from its events; the only class that prints progress.

    Feeding is cheap: drawing happens a few times per second, not per event. Thread-safe.

    Args:
        total_steps: steps of each region.
        regions: names, in the order to show.
        console: console; None: standard error, so that standard output contains only results.
        plain: lines instead of a live table; None decides by whether the console is a terminal.
        clock: for throttling and elapsed time; the machine's if None.
    """

    def __init__(
        self,
        total_steps: int,
        regions: Sequence[str],
        console: Console | None = None,
        plain: bool | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._console = console or Console(stderr=True)
        self._plain = not self._console.is_terminal if plain is None else plain
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._run = RunNow(tuple(regions))
        self._status = ""
        self._wait: _Wait | None = None
        self._started = False
        self._begun_at_s = self._fed_at_s = self._clock.now_s()
        self._printed_at_s = self._status_at_s = self._begun_at_s
        self._printed_line = ""
        self._unprinted: list[str] = []
        self._spinner = Spinner("dots")
        self._first_steps: dict[str, int] = {}
        self._joined_at_s: dict[str, float] = {}  # of regions that joined after the start
        # The same by the run's clock, which also covers the time before it was watched.
        self._begun_t_s = self._newest_t_s = 0.0
        self._joined_t_s: dict[str, float] = {}
        self._is_real = False
        self._groups: frozenset[str] = frozenset()  # regions that are process groups
        self._ended_s: float | None = None  # duration in the summary
        self._said_at_s = self._begun_at_s
        self._closed = threading.Event()
        self._live: Live | None = None
        if not self._plain:
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
            )
            self._live.start()
        elif clock is None:
            threading.Thread(target=self._tick_until_closed, daemon=True).start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def status(self, text: str) -> None:
        """Show a phase of the start-up or the end, such as ``starting cluster: 2 of 4 nodes``."""
        with self._lock:
            if text == self._status:
                return
            self._status, self._wait = text, None
            self._status_at_s = self._clock.now_s()
            if self._plain and text:
                self._printed_at_s = self._status_at_s
                self._say(escape(text))
        self._print()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._say(escape(text))
        self._print()

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        """Show the progress of a start-up phase; called repeatedly during the phase.

        Args:
            phase: description of the phase, such as ``starting processes``.
            done: number of ready items; the last one ends the phase.
            total: number of items.
            names: names of the items that are not ready.
        """
        with self._lock:
            now_s = self._clock.now_s()
            before = self._wait
            since_s = before.since_s if before is not None and before.phase == phase else now_s
            wait = _Wait(phase, since_s, done, total, tuple(names))
            self._wait = wait if done < total else None
            if self._wait and self._plain and now_s - self._printed_at_s >= PLAIN_WAIT_EVERY_S:
                self._printed_at_s = now_s
                self._say(escape(wait.text(now_s)))
        self._print()

    def feed(self, event: Event) -> None:
        """Process the next event of the run."""
        with self._lock:
            now_s = self._clock.now_s()
            self._run.feed(event)
            self._fed_at_s = now_s
            self._newest_t_s = max(self._newest_t_s, event.t_s)
            if event.kind == "run_started":
                self._started, self._begun_at_s = True, now_s
                self._begun_t_s = self._newest_t_s = event.t_s
                self._joined_t_s.clear()
                self._is_real = not event["simulated"]
                self._groups = frozenset(event.fields.get("ranks", ()))
                self._ended_s = None
                self._printed_at_s = now_s
                self._first_steps.clear()
                self._joined_at_s.clear()
                self._status, self._wait = "", None
                if event.fields.get("links"):
                    self._say(escape(event["links"]))
            elif event.kind == "run_finished":
                self._ended_s = event["summary"].get("seconds")
            elif event.kind == "region_joined":
                self._first_steps.pop(event["region"], None)
                self._joined_at_s[event["region"]] = now_s
                self._joined_t_s[event["region"]] = event.t_s
            elif event.kind == "step":
                self._first_steps.setdefault(event["region"], event["step"] - 1)
            if event.kind in _TOLD:
                self._describe(event)
            if self._plain and self._started and now_s - self._printed_at_s >= PLAIN_LINE_EVERY_S:
                self._printed_at_s = now_s
                self._printed_line = self.line()
                self._say(escape(self._printed_line))
        self._print()

    def tick(self) -> None:
        """Print the state in line mode if the last line is a few seconds old."""
        with self._lock:
            now_s = self._clock.now_s()
            phase = self._phase()
            if not phase and (not self._started or self._ended_s is not None):
                return
            passed_s = now_s - self._status_at_s if phase else 0.0
            every_s = max(PLAIN_WAIT_EVERY_S, _SHARE * passed_s)  # long waits fill no log
            if not self._plain or now_s - self._said_at_s < every_s:
                return
            self._printed_at_s = now_s
            self._printed_line = self.line() if not phase else self._printed_line
            self._say(escape(phase or self._printed_line))
        self._print()

    def _tick_until_closed(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.tick()

    def close(self) -> None:
        """Stop drawing and restore the terminal; idempotent."""
        self._closed.set()
        live, self._live = self._live, None
        if live is not None:
            live.stop()  # not under the lock: the drawing thread may be waiting for it
        with self._lock:
            if self._plain and self._started and self.line() != self._printed_line:
                self._printed_line = self.line()
                self._say(escape(self._printed_line))
        self._print()

    def render(self) -> RenderableType:
        """Give the current content of the terminal."""
        with self._lock:
            parts: list[RenderableType] = []
            if self._started:
                parts += [self._table(), Text(self._overall())]
            phase = self._phase()
            if phase:
                self._spinner.update(text=Text(phase))
                parts.append(self._spinner)
            return Group(*parts)

    def line(self) -> str:
        """Give the state of the run as one line without markup."""
        with self._lock:
            regions = [self._region(name, each) for name, each in self._run.regions.items()]
            return " | ".join([self._overall(), *regions])

    def _region(self, name: str, region: RegionNow) -> str:
        steps = f"{region.step}/{self._total_steps}"
        if region.gone and region.step < self._total_steps:
            return f"{name} {region.gone} at {steps}"
        return f"{name} {steps} newest loss {number_text(region.loss)}"

    def _phase(self) -> str:
        now_s = self._clock.now_s()
        if self._wait is not None:
            return self._wait.text(now_s)
        took_s = now_s - self._status_at_s
        if self._status and took_s >= _LONG_S:
            return f"{self._status} ({coarse_text(took_s)})"
        return self._status

    def _table(self) -> FittedTable:
        gap = 1 if self._console.width < 90 else 2
        table = FittedTable(
            leave_out=_LEFT_OUT,
            whole=("state",),
            named=False,
            box=None,
            padding=(0, gap, 0, 0),
            pad_edge=False,
        )
        for heading in _HEADINGS:
            left = heading in ("region", "state")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for name, region in self._run.regions.items():
            table.add_row(name, *self._cells(region))
        return table

    def _cells(self, region: RegionNow) -> list[TextType]:
        now_s = self._run.now_s
        state = Text(region.state(now_s, self._total_steps))
        if region.faults:
            state.append(f" {counted(region.faults, 'fault')}", "yellow")
        return [
            f"{region.step}/{self._total_steps}",
            number_text(region.loss),
            number_text(round(region.rates.samples.per_s(now_s), 1)),
            f"{region.rates.sent.per_s(now_s) * 8e-6:.1f}",
            f"{region.rates.received.per_s(now_s) * 8e-6:.1f}",
            number_text(region.staleness),
            f"{region.rates.wait_fraction(now_s):.0%}",
            state,
        ]

    def _overall(self) -> str:
        run = self._run
        if self._ended_s is not None:
            parts = [coarse_text(self._ended_s) + (" simulated" if run.simulated else "")]
        elif run.simulated:
            parts = [f"{coarse_text(run.now_s)} simulated"]
        else:
            since_s = max(0.0, self._clock.now_s() - self._fed_at_s)
            parts = [coarse_text(run.now_s + since_s)]
        left_s = self._left_s()
        if left_s is not None:
            parts.append(f"about {coarse_text(left_s)} left")
        if run.round is not None:
            parts.append(f"round {run.round}")
        if run.newest_eval is not None:
            step, metrics = run.newest_eval["step"], run.newest_eval["metrics"]
            parts.append(f"eval at step {step}: {metrics_text(metrics)}")
        return ", ".join(parts)

    def _left_s(self) -> float | None:
        """Estimate the remaining seconds from the speed of the slowest region."""
        left_s = 0.0
        for name, region in self._run.regions.items():
            elapsed_s = self._clock.now_s() - self._joined_at_s.get(name, self._begun_at_s)
            if self._is_real:  # the clock of a simulated run does not measure waiting
                begun_t_s = self._joined_t_s.get(name, self._begun_t_s)
                elapsed_s = max(elapsed_s, self._newest_t_s - begun_t_s)
            done = region.step - self._first_steps.get(name, region.step)
            if region.step >= self._total_steps or region.gone:
                continue
            if done <= 0 or elapsed_s <= 0:
                return None
            left_s = max(left_s, (self._total_steps - region.step) * elapsed_s / done)
        return left_s if left_s > 0 else None

    def _describe(self, event: Event) -> None:
        """Print notable events as permanent lines."""
        region = event.fields.get("region", "")
        what = "rank" if region in self._groups else "worker"
        who = escape(f"{region} {what} {event.fields.get('worker', '')}")
        cause = escape(str(event.fields.get("cause", "")))
        match event.kind:
            case "worker_lost":
                self._say(f"[yellow]{what} lost[/]: {who}: {cause}")
            case "worker_replaced":
                self._say(f"[green]worker replaced[/]: {who}, attempt {event['attempt']}")
            case "bridge_replaced":
                region, took_s = escape(event["region"]), event["took_s"]
                self._say(f"[green]bridge replaced[/]: {region} after {took_s:.1f} s: {cause}")
            case "run_actor_attached":
                downtime_s = event["downtime_s"]
                self._say(f"[green]run actor attached[/] after {downtime_s:.1f} s without one")
            case "worker_left":
                self._say(f"[yellow]worker leaving[/]: {who}: {cause}")
            case "active_workers":
                part = "takes part" if event["workers"] == 1 else "take part"
                self._say(
                    f"workers of {escape(event['region'])} after step {event['step']}: "
                    f"{event['workers']} {part}, {counted(event['rows'], 'row')} per step"
                )
            case "step_refused" if self._run.regions[event["region"]].faults <= 3:
                region = escape(event["region"])
                self._say(f"[yellow]step refused[/]: {region} step {event['step']}: {cause}")
            case "state_changed":
                names, region = escape(event["names"]), escape(event["region"])
                how = event["how"] if event["how"] in _STATE_CHANGES else "changed"
                what, effect = _STATE_CHANGES[how]
                self._say(f"[yellow]{what}[/]: {region} step {event['step']}: {names}; {effect}")
            case "region_joined":
                size, took_s = bytes_text(event["bytes"]), event["took_s"]
                number = event.fields.get("round")  # missing in runs of older releases
                at = "" if number is None else f" at round {number:,}"
                self._say(f"[green]{escape(event['region'])} joined[/]{at}, {size}, {took_s:.1f} s")
            case "region_drained":
                noticed = event.fields.get("cause") == "notice"  # missing in runs of older releases
                why = ": its machine will be terminated; it will rejoin" if noticed else ""
                self._say(f"[yellow]{escape(event['region'])} has left[/]{why}")
            case "averager_moved":
                self._say(f"[yellow]the averager moved[/] to {escape(event['region'])}")
            case "standby_ready":
                self._say(f"{escape(event['name'])} is the averager's standby")
            case "server_replaced":
                self._say(f"[yellow]the server is lost[/]: {cause}")
                self._say(f"the standby serves the run at {escape(event['address'])}")
            case "server_standby_ready":
                self._say(f"a standby is ready at {escape(event['address'])}")
            case "server_standby_lost":
                self._say(f"[yellow]the standby is lost[/]: {cause}")
            case "run_resumed":
                self._say("[green]going on[/]")
            case "stop_requested":
                self._say(f"[yellow]stopping[/]: {cause}")
            case "checkpoint_failed":
                self._say(f"[yellow]checkpoint failed, the previous one is unchanged[/]: {cause}")
            case "checkpoint" if self._plain and not self._run.simulated:  # simulations write none
                self._say(f"checkpoint {escape(str(event['id']))} at step {event['step']}")

    def _say(self, markup: str) -> None:
        self._said_at_s = self._clock.now_s()
        self._unprinted.append(markup)

    def _print(self) -> None:
        """Print pending lines; not under the lock, because the drawing thread takes both locks."""
        with self._lock:
            lines, self._unprinted = self._unprinted, []
        for markup in lines:
            self._console.print(printable(markup), highlight=False, soft_wrap=True)
