"""Checkpoints of a run that serves joined regions: when they are made, and how they are read.

The averager's actor coordinates the regions (`geo_ray.joining.save_round`), whose ranks keep their
own state. The run loop fetches the averagers' state in pieces, writes one part per slice, and
commits the manifest, so that the actor needs no access to the run's directory. Without the manifest
the checkpoint does not exist, whatever the regions have committed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from geo_ray.base.canonical import JSONObject
from geo_ray.base.errors import CheckpointMismatchError, GeoRayError
from geo_ray.base.load import digest
from geo_ray.base.user_code import error_summary
from geo_ray.experiment.experiment import Experiment
from geo_ray.joining.layout import Layout
from geo_ray.joining.protocol import SERVER
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.slices import SavedRun, SavedSlice
from geo_ray.ray_cluster.calls import Handle, collect
from geo_ray.runs.checkpoints import SAVED_REGIONS
from geo_ray.runs.resume import STRATEGY, check_strategy_kind, codecs_of
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.manifest import AVERAGER_PART, CheckpointManifest
from geo_ray.storage.parts import DTYPES, write_part

log = logging.getLogger(__name__)

_ANSWER_S: Final = 120.0
_RETRY_S: Final = 5.0
_AGAIN_S: Final = 0.2
_PIECE_BYTES: Final = 32 << 20
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
LAYOUT: Final = "layout"
STEPS: Final = "region_steps"
"""Keys of a manifest: the model, and the steps of each region."""


@dataclass(frozen=True, slots=True)
class SliceHead:
    """A saved slice without the values of its tensors, as plain values for a call of an actor.

    Attributes:
        ranges: ranges of the slice.
        control: plain values, as JSON.
        tensors: type code and shape by name.
    """

    ranges: tuple[tuple[int, int], ...]
    control: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(cls, saved: SavedSlice) -> SliceHead:
        """Return the head of a slice."""
        tensors = {k: (_CODES[v.dtype], tuple(v.shape)) for k, v in saved.tensors.items()}
        return cls(saved.ranges, json.dumps(saved.control), tensors)

    def empty(self) -> SavedSlice:
        """Return a slice whose tensors have no values yet."""
        tensors = {
            name: torch.empty(shape, dtype=DTYPES[code])
            for name, (code, shape) in self.tensors.items()
        }
        return SavedSlice(self.ranges, tensors, json.loads(self.control))


def bytes_of(tensor: Tensor, start: int, stop: int) -> bytes:
    """Return some bytes of a contiguous tensor."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat[start:stop].numpy().tobytes()


def set_bytes(tensor: Tensor, start: int, data: bytes) -> None:
    """Set some bytes of a contiguous tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    flat[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pieces_of(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Return the byte ranges in which a tensor is sent."""
    size = tensor.numel() * tensor.element_size()
    for start in range(0, size, _PIECE_BYTES):
        yield start, min(size, start + _PIECE_BYTES)


def read_saved(found: Checkpoint, experiment: Experiment) -> SavedRun:
    """Read the server's part of a checkpoint.

    The configuration's options of the strategy replace those of the checkpoint: the user has
    allowed each change.

    Raises:
        CheckpointError: it cannot be read, or belongs to a run whose regions do not join.
        ConfigChangedError: the strategy is another one.
    """
    manifest = found.manifest
    check_strategy_kind(manifest, experiment)
    layout, steps = manifest.extra.get(LAYOUT), manifest.extra.get(STEPS)
    names = [part.name for part in manifest.parts if part.name.startswith(AVERAGER_PART)]
    if not isinstance(layout, str) or not isinstance(steps, dict) or not names:
        raise CheckpointMismatchError(
            f"checkpoint {manifest.id} is not of a run that joined regions",
            fix="Resume the run with its own configuration.",
        )
    slices = []
    for name in sorted(names):
        tensors, meta = found.read(name)
        body: Any = meta
        ranges = tuple((int(a), int(b)) for a, b in body["ranges"])
        slices.append(SavedSlice(ranges, tensors, body["control"]))
    counts = {name: int(str(count)) for name, count in steps.items()}
    strategy = experiment.strategy.model_dump(mode="json")
    return SavedRun(manifest.id, Layout.from_json(layout), tuple(slices), counts, strategy)


def send_saved(actor: Handle, saved: SavedRun, start: int, stop: int) -> None:
    """Send the server's part of a checkpoint to an actor that holds slices, before it listens.

    Args:
        actor: the actor.
        saved: the checkpoint.
        start: first position of the range of the model that the actor holds.
        stop: end of that range; slices outside of it are sent without their tensors.
    """
    for index, each in enumerate(saved.slices):
        part = each if each.is_within(start, stop) else replace(each, tensors={})
        collect({SERVER: actor.add_saved.remote(SliceHead.of(part))}, _ANSWER_S)
        for name, tensor in part.tensors.items():
            for first, last in pieces_of(tensor):
                data = bytes_of(tensor, first, last)
                collect({SERVER: actor.add_piece.remote(index, name, first, data)}, _ANSWER_S)
    about = (saved.id, saved.layout.to_json(), dict(saved.steps), dict(saved.strategy))
    collect({SERVER: actor.resume.remote(*about)}, _ANSWER_S)


class ServerCalls(Protocol):
    """Calls of the process that serves the run."""

    @property
    def actor(self) -> Handle:
        """Its actor, which a standby may replace."""
        ...

    @property
    def holders(self) -> Sequence[Handle]:
        """The actors of other processes that hold slices, in their order."""
        ...

    def ask(self, call: str, *arguments: Any) -> Any:
        """Call its actor; the standby answers if it is lost."""
        ...


class ServedCheckpoints:
    """Makes the checkpoints of a served run, one at a time.

    Attributes:
        outcome: why the newest checkpoint has failed, or "" if it was made; None before the first.

    Args:
        store: where they are.
        experiment: the run.
        server: the averager's process.
        lease_token: of the run actor, informative.
    """

    def __init__(
        self, store: CheckpointStore, experiment: Experiment, server: ServerCalls, lease_token: int
    ) -> None:
        self._store, self._experiment, self._server = store, experiment, server
        self._lease_token = lease_token
        self._next_s = time.monotonic() + (experiment.checkpoint.every_s or 0.0)
        self._next_round = experiment.checkpoint.every_rounds or 0
        self.outcome: str | None = None
        self._open: int | None = None
        self._halts = False  # whether training ends at the open checkpoint
        self._is_last = False  # whether the run has ended before the open checkpoint
        self._counted = -1  # checkpoint from whose round the next one is counted
        self._retry_s = 0.0
        self._closed = -1  # newest checkpoint that has ended
        self._left_out: dict[str, str] = {}
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._commit: Future[CheckpointManifest] | None = None
        self._ending: Any = None  # call that ends the newest checkpoint

    def poll(
        self,
        save: Mapping[str, Any] | None,
        rounds: int,
        *,
        trains: bool,
        halts: bool = False,
    ) -> list[dict[str, Any]]:
        """Continue the open checkpoint, or begin one when it is time.

        Args:
            save: the averager's checkpoint in progress, as its actor reports it.
            rounds: commits of the averager.
            trains: whether the run may begin a checkpoint.
            halts: whether training must end at the next checkpoint, which then begins at once.

        Returns:
            Events: ``checkpoint`` and ``checkpoint_failed``.
        """
        if self._commit is not None:
            return self._committed(self._commit)
        if save is not None and self._open is None:
            if save["id"] > self._closed:
                self._open, self._left_out = save["id"], {}  # begun by a call with a lost answer
            else:
                self._ending = self._server.actor.end_save.remote(save["id"])  # it may be lost
                return []
        if save is not None and save["id"] != self._counted:
            self._counted = save["id"]
            at = rounds + (save["stage"] == SaveStage.MEETING.value)
            self._next_round = at + (self._experiment.checkpoint.every_rounds or 0)
        if self._open is not None:
            if save is None:
                return self._failed("the run ended, or was asked to, before all regions had met")
            stage = SaveStage(save["stage"])
            self._left_out = dict(save["failed"])
            if stage is SaveStage.FAILED:
                return self._failed("no region has saved its part")
            if stage is SaveStage.READY:
                self._commit = self._writer.submit(self._write, self._open, tuple(save["saved"]))
            elif stage is SaveStage.MEETING and halts and not self._halts:
                self._begin(halt=True)
        elif trains and halts and not self._halts:
            self._begin(halt=True)
        elif trains and save is None and self._is_due(rounds):
            self._begin()
        return []

    def _is_due(self, rounds: int) -> bool:
        """Return whether to begin a checkpoint, which is made at the end of the present round."""
        config, now_s = self._experiment.checkpoint, time.monotonic()
        if config.every_rounds is not None:
            return rounds + 1 >= self._next_round and now_s >= self._retry_s
        return bool(config.every_s) and now_s >= self._next_s

    def begin_last(self) -> bool:
        """Begin the checkpoint after the end of the run; return whether that is possible."""
        self._begin()
        self._is_last = self._open is not None
        return self._is_last

    @property
    def is_open(self) -> bool:
        """Whether a checkpoint is being made."""
        return self._open is not None

    def close(self) -> None:
        """Give up the open checkpoint."""
        if self._commit is not None:
            self._writer.shutdown()
            self._committed(self._commit)
        if self._open is not None:
            self._failed("the run has ended")
        self._writer.shutdown()

    def _begin(self, *, halt: bool = False) -> None:
        if self._ending is not None:  # the actor has several threads, which keep no order
            with suppress(GeoRayError):  # it is lost, and the next call finds that out
                collect({SERVER: self._ending}, _ANSWER_S)
            self._ending = None
        lowest, keep = self._store.next_id(), self._store.ids()  # until the run has removed them
        timeout_s = self._experiment.checkpoint.part_timeout_s
        checkpoint = self._server.ask("begin_save", lowest, keep, timeout_s, halt)
        self._halts = halt and checkpoint is not None
        if checkpoint is None:
            self._retry_s = time.monotonic() + _AGAIN_S
            self._next_s = time.monotonic() + min(_RETRY_S, self._every_s)
            return
        self._open, self._left_out = checkpoint, {}
        self._next_s = time.monotonic() + self._every_s

    @property
    def _every_s(self) -> float:
        return self._experiment.checkpoint.every_s or 0.0

    def _write(self, checkpoint: int, saved: tuple[str, ...]) -> CheckpointManifest:
        """Fetch, write and commit; in another thread."""
        folder = self._store.begin(checkpoint)
        heads, layout, steps = self._ask(self._server.actor.saved_heads.remote())
        own = [(self._server.actor, index, head) for index, head in enumerate(heads)]
        for holder in self._server.holders:
            held, _, _ = self._ask(holder.saved_heads.remote())
            own += [(holder, index, head) for index, head in enumerate(held)]
        written = []
        for number, (actor, index, head) in enumerate(own):
            part = head.empty()
            for name, tensor in part.tensors.items():
                for start, stop in pieces_of(tensor):
                    call = actor.saved_piece.remote(index, name, start, stop)
                    set_bytes(tensor, start, self._ask(call))
            meta: JSONObject = {
                "ranges": [list(pair) for pair in part.ranges],
                "control": json.loads(head.control),
            }
            written.append(write_part(folder, f"{AVERAGER_PART}-{number:05d}", part.tensors, meta))
        extra: dict[str, JsonValue] = {
            "attempt": 1,
            "lease_token": self._lease_token,
            "codecs": codecs_of(self._experiment),
            STRATEGY: self._experiment.strategy.kind,
            SAVED_REGIONS: [*sorted(saved)],
            LAYOUT: layout,
            STEPS: dict(steps),
        }
        manifest = CheckpointManifest(
            id=checkpoint,
            step=max(steps.values(), default=0),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config_digest=digest(self._experiment),
            parts=tuple(written),
            healthy=all(part.finite for part in written),
            extra=extra,
        )
        is_whole = self._is_last and not self._left_out
        self._store.commit(checkpoint, manifest, is_last=is_whole)
        return manifest

    def _ask(self, call: Any) -> Any:
        return collect({SERVER: call}, _ANSWER_S)[SERVER]

    def _committed(self, commit: Future[CheckpointManifest]) -> list[dict[str, Any]]:
        """Return the events of a commit, if it has ended."""
        if not commit.done():
            return []
        self._commit, error = None, commit.exception()
        if error is not None:
            cause = error.message if isinstance(error, GeoRayError) else error_summary(error)
            return self._failed(cause)
        manifest, self._open, self.outcome = commit.result(), None, ""
        self._closed = manifest.id
        self._ending = self._server.actor.end_save.remote(manifest.id)
        for region, cause in self._left_out.items():
            log.warning("checkpoint %d has no part of '%s': %s", manifest.id, region, cause)
        size = sum(part.bytes for part in manifest.parts)
        return [
            *(self._unsaved(region, cause) for region, cause in self._left_out.items()),
            {"kind": "checkpoint", "id": manifest.id, "step": manifest.step, "bytes": size},
        ]

    def _failed(self, cause: str) -> list[dict[str, Any]]:
        checkpoint, self._open, self._halts, self.outcome = self._open, None, False, cause
        self._closed = max(self._closed, -1 if checkpoint is None else checkpoint)
        self._ending = self._server.actor.end_save.remote(checkpoint)
        if checkpoint is not None and not self._store.is_committed(checkpoint):
            try:
                self._store.abandon(checkpoint)
            except GeoRayError as error:
                log.warning("files of checkpoint %d remain: %s", checkpoint, error.message)
        log.warning("checkpoint %s failed: %s", checkpoint, cause)
        causes = [f"region '{name}': {why}" for name, why in self._left_out.items()] or [cause]
        return [{"kind": "checkpoint_failed", "cause": "; ".join(causes)}]

    def _unsaved(self, region: str, cause: str) -> dict[str, Any]:
        text = f"region '{region}' has no part of the checkpoint: {cause}"
        return {"kind": "checkpoint_failed", "cause": text}
