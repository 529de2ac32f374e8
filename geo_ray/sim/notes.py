"""What a simulated run tells of steps, exchanges and links: the events of a real run."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.job.eval_notes import Emit
from geo_ray.sim.network import Network
from geo_ray.sim.scheduler import Scheduler
from geo_ray.strategies.base import Reply
from geo_ray.training.compute.state_guard import StateChange
from geo_ray.training.exchange.region_wire import RegionWire
from geo_ray.training.server.effects import SendUpdate, StepDone, TeamChanged


@dataclass(slots=True)
class SimNotes:
    """Takes what happens, and emits it.

    Attributes:
        emit: takes the events.
        scheduler: has the time.
        network: has counted what was sent.
    """

    emit: Emit
    scheduler: Scheduler
    network: Network
    _applied_s: dict[str, float] = field(default_factory=dict)

    def sent(self) -> dict[tuple[str, str], dict[str, int]]:
        """Bytes so far by (source, destination) and class."""
        sent = {pair: dict(classes) for pair, classes in self.network.sent_bytes.items()}
        for (src, dst), classes in sorted(sent.items()):
            self.emit("wan", self.scheduler.now_s, src=src, dst=dst, bytes_by_class=classes)
        return sent

    def exchange(self, send: SendUpdate, reply: Reply, began_s: float, wire: RegionWire) -> None:
        """An answer has come to what a region sent at ``began_s``."""
        before = 4 * wire.num_of(send.update.fragment)
        event = send.event(send.update, reply, began_s, before)
        self.emit("exchange", self.scheduler.now_s, region=reply.to, **event)

    def step(self, name: str, done: StepDone, began_s: float) -> None:
        """A region has made a step."""
        now_s = self.scheduler.now_s
        event = done.event(began_s, self._applied_s.get(name, 0.0), now_s)
        self._applied_s[name] = now_s
        self.emit("step", now_s, region=name, **event)
        for cause in done.refused:
            self.emit("step_refused", now_s, region=name, step=done.step, cause=cause)
        if done.noise is not None:
            self.emit("noise", now_s, region=name, **done.noise.fields())

    def changed(self, name: str, step: int, change: StateChange) -> None:
        """A region's step changed what no step should."""
        about = {"region": name, "step": step, "how": change.how, "names": change.names}
        self.emit("state_changed", self.scheduler.now_s, **about)

    def team(self, name: str, changed: TeamChanged) -> None:
        """A region's workers have changed."""
        self.emit("team", self.scheduler.now_s, region=name, **changed.event())
