"""The error hierarchy of geo_ray.

Every error has a stable code, a process exit code, and advice on how to fix it. Each class
carries everything that `docs/reference/generated/errors.md` says about it;
`geo_ray.testing.reference_pages` generates
that page. All classes live in this module, so that `from_code` finds an error by its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class GeoRayError(Exception):
    """The root of all errors.

    Args:
        message: what went wrong, naming the key, shard, region or file.
        fix: what to do about it, if more is known than the class's general advice.

    Attributes:
        code: the name that stays the same in every release.
        exit_code: what the process ends with.
        chapter: heading of its section in `docs/reference/generated/errors.md`.
        causes: what usually leads to it.
        advice: what to do about it; shown where the message comes without a fix of its own.
        more: what else is worth knowing when mending it; in `docs/reference/generated/errors.md`
        only.
    """

    code: ClassVar[str] = "GEO_RAY"
    exit_code: ClassVar[int] = 1
    chapter: ClassVar[str] = ""
    causes: ClassVar[str] = (
        "It is never raised by itself; seeing this code means that a more exact one is missing."
    )
    advice: ClassVar[str] = "Read the message; the event log of the run has the details."
    more: ClassVar[str] = "Please report it."

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix or self.advice

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries errors between its processes; keyword arguments would be lost otherwise.
        return (_rebuild, (type(self), self.message, self.fix))


def every_class() -> list[type[GeoRayError]]:
    """All classes of the tree, parents before their children."""
    kinds: list[type[GeoRayError]] = [GeoRayError]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    return kinds


def from_code(code: str, message: str, fix: str | None) -> GeoRayError:
    """The error with this code; the tree's root if this release has no such code."""
    found = next((kind for kind in every_class() if kind.code == code), GeoRayError)
    return found(message, fix=fix)


def _rebuild(kind: type[GeoRayError], message: str, fix: str) -> GeoRayError:
    return kind(message, fix=fix)


class InvariantError(GeoRayError):
    """The software contradicts itself; this is a bug of geo_ray."""

    code = "INVARIANT"
    exit_code = 70
    chapter = "Bugs"
    causes = "Unknown, by definition. The message names the invariant that does not hold."
    advice = "Report it with the run directory; the message names the invariant."
    more = "The run directory has everything that is needed to find it."


class ConfigError(GeoRayError):
    """A configuration cannot be used.

    Nothing was started, rented or written.
    """

    code = "CONFIG_INVALID"
    exit_code = 2
    chapter = "Configuration"
    causes = (
        "An unknown or misspelt key, a wrong type, a number out of its range, a missing value, two "
        "keys that contradict each other, a duplicate key, YAML that is broken or that uses tags, "
        "anchors, NaN or infinities, a `--set` that is not `key.key=value`, a file that is absent, "
        "larger than 1 MB or not UTF-8."
    )
    advice = "Correct what the message names; `geo-ray config schema KEY` shows what a key takes."
    more = (
        "The message lists every problem at once: the key's path, its line (or `--set`), what is "
        "there, what is expected and the nearest valid key or value. `geo-ray config schema` lists "
        "every key. Numbers such as `1e-3` may be written bare; `no`, `on` and `12:30` are text, "
        "as in YAML 1.2."
    )


class DataError(GeoRayError):
    """Something is wrong with the training data."""

    code = "DATA"
    exit_code = 3
    chapter = "Data"
    causes = "See the codes of this chapter."
    advice = "Correct the file or the folder that the message names."


class ShardCorruptError(DataError):
    """A shard's bytes do not have the SHA-256 or the size that the manifest states.

    Not a row of it was used.
    """

    code = "DATA_CORRUPT"
    causes = (
        "A damaged or truncated file, an upload that did not finish, a shard that was overwritten "
        "after the manifest was made."
    )
    advice = "Restore the shard from its source, or write the data anew with `geo-ray data shard`."


class ShardMissingError(DataError):
    """A shard of the manifest is not in its region's store."""

    code = "DATA_MISSING"
    causes = (
        "The store's address is another bucket or directory, the shard was never uploaded or has "
        "been deleted by a life-cycle rule, or the credentials may not list it."
    )
    advice = "Check the store's address and credentials, then that the shard was uploaded."
    more = "The address is under `stores` in the manifest."


class SchemaMismatchError(DataError):
    """A shard's columns, types or lengths are not those of the manifest or of the task."""

    code = "DATA_SCHEMA"
    causes = (
        "Data written for another task or another version of it, a column with nulls, a list "
        "column whose rows differ in length, a column type that geo_ray does not read because "
        "decoding it could execute code."
    )
    advice = "Write the shard with the columns and types that the task has."


class DataLeftOutError(DataError):
    """Something at the address of the input is not read, and ``--strict`` does not allow that."""

    code = "DATA_LEFT_OUT"
    causes = (
        "A name that ends in nothing that geo_ray reads, a compression that it does not unpack, a "
        "link to a folder, a folder without permission, a file without rows."
    )
    advice = "Move what is no data elsewhere, or leave `--strict` out."


class ShardEmptyError(DataError):
    """A shard, or a region's whole share of the data, has no rows."""

    code = "DATA_EMPTY"
    causes = (
        "More regions than rows, a skewed split that leaves a region nothing, a region of the "
        "configuration that the manifest does not know."
    )
    advice = (
        "Give the region data, take it out of the configuration, or choose a less skewed split."
    )


class RegionsOmittedError(DataError):
    """The manifest has rows of regions that the configuration does not mention."""

    code = "REGIONS_OMITTED"
    causes = (
        "A region that was forgotten or is called otherwise in the configuration; a run on a part "
        "of the regions on purpose."
    )
    advice = "Add the regions to `regions`, or name them in `data.leave_out`."


class ResidencyDeniedError(DataError):
    """A process asked for a shard of a region other than its own.

    It was refused before any byte was read.
    """

    code = "RESIDENCY_DENIED"
    causes = (
        "A `region` in the manifest that does not match where the shard lies, or a node with the "
        "wrong `ray.io/availability-region` label."
    )
    advice = "Correct the node's label, or the `region` of the shard in the manifest."
    more = "There is no switch that turns this check off."


class StoreError(DataError):
    """An object store or file system does not answer, refuses, or has no room."""

    code = "STORE"
    causes = (
        "A wrong endpoint or bucket name, expired or missing credentials, throttling that "
        "outlasted the retries, a full disk."
    )
    advice = "Check the endpoint, the credentials and the bucket's name."
    more = "The provider's own tool, run on the same machine, tells which of them it is."


class ManifestError(DataError):
    """A manifest cannot be read or contradicts itself."""

    code = "MANIFEST_INVALID"
    causes = (
        "An edit by hand, a file of another kind, a manifest of a newer version of geo_ray, shard "
        "paths that leave their store."
    )
    advice = "Write the manifest anew with `geo-ray data shard`."


class TaskError(GeoRayError):
    """Something is wrong with the task, that is with the user's code."""

    code = "TASK"
    exit_code = 4
    chapter = "Task"
    causes = "See the codes of this chapter."
    advice = "Mend the part of the task that the message names."


class TaskLoadError(TaskError):
    """The task does not import, lacks something that a task must have, or refuses an option."""

    code = "TASK_LOAD"
    causes = (
        "A misspelt file, module, class or option, an import that fails on this machine, a missing "
        "method, columns of an unknown type."
    )
    advice = "Mend what the message names; docs/guides/tasks.md says what a task must define."
    more = (
        "The message names the nearest valid name. For a wrong option it lists the options of the "
        "task with their types and defaults; for a file that fails while it is imported it names "
        "the line."
    )


class TaskOutputError(TaskError):
    """The task's model, loss or evaluation has the wrong form."""

    code = "TASK_OUTPUT"
    causes = (
        "A loss that is a vector, an integer or detached from the parameters; an evaluation that "
        "does not return one-dimensional float64 sums; a model whose parameters are not fp32, "
        "have no shape yet, share memory or cannot be saved; a loss that a GradScaler scales; an "
        "exception in a method."
    )
    advice = "Mend what the message names; the loss is a scalar that depends on the parameters."
    more = (
        "`evaluate` returns sums over the rows of a batch; docs/guides/tasks.md "
        "has an example of each."
    )


class TaskStateError(TaskError):
    """Values of the model that are not trained change, or differ between processes."""

    code = "TASK_STATE"
    causes = (
        "A moving average of the weights, a queue, a codebook or spectral normalisation that the "
        "task does not declare; a pattern of `model_buffers` or `groups` that fits nothing; a "
        "frozen part that is read from different files on different machines; model buffers where "
        "updates are summed on their way; a loss that computes with other parameters than those "
        "that are trained; `requires_grad` switched in the first steps."
    )
    advice = (
        "Declare what changes in the task's `model_buffers`; docs/guides/tasks.md has the rules."
    )
    more = (
        "What changes in the forward pass without a gradient is exchanged between regions, saved "
        "in checkpoints and in the model only if the task names it. The message names it."
    )


class OwnCodeError(TaskError):
    """A strategy or codec of the user's raised an exception."""

    code = "OWN_CODE"
    causes = (
        "A mistake in the class that `strategy.use` or `codec.*.use` names: an attribute that is "
        "not there, tensors of two shapes, a case that was not thought of."
    )
    advice = "Mend the named line; `geo-ray check FILE.py:CLASS` shows most such mistakes."
    more = (
        "The message names the class, the method and the line; "
        "docs/guides/custom-strategies.md says what each does."
    )


class NonFiniteError(TaskError):
    """A loss, gradient or update is NaN or infinite.

    It was refused before it changed any parameter.
    """

    code = "NON_FINITE"
    causes = (
        "A learning rate that is too high, missing gradient clipping, a logarithm or division of "
        "zero, bad samples. The run ends only after several refusals in a row; each is a "
        "`step_refused` event."
    )
    advice = (
        "Lower `optimizer.lr` or clip gradients: `geo-ray train --resume RUN "
        "--set train.clip_norm=1.0`."
    )
    more = (
        "If single samples are bad, take them out of the data: the `step_refused` events name the "
        "region and the step."
    )


class ClusterError(GeoRayError):
    """Something is wrong with the Ray cluster."""

    code = "CLUSTER"
    exit_code = 5
    chapter = "Cluster"
    causes = "See the codes of this chapter."
    advice = "Read the message; `ray status` on the head says what the cluster has."


class ClusterStartError(ClusterError):
    """The local cluster does not come up."""

    code = "CLUSTER_START"
    causes = (
        "Too little memory or shared memory, ports taken, another Ray version in the path, a "
        "firewall on localhost."
    )
    advice = "Read the log that the message names; free memory or ports if they ran out."


class RayUnreachableError(ClusterError):
    """No Ray cluster answers at the configured address."""

    code = "RAY_UNREACHABLE"
    causes = (
        "The cluster is not running, the address or port is wrong, a firewall or a missing token "
        "is in the way."
    )
    advice = (
        "Start the cluster, or correct its address: `cluster.address` of a configuration, "
        "`--address` of a command. A run can do without: `cluster.kind: local`."
    )


class PreflightError(ClusterError):
    """The cluster answers but is not fit for the job.

    Nothing of the job was started.
    """

    code = "PREFLIGHT"
    causes = (
        "A region without labelled nodes, too few CPUs, another version of geo_ray, Ray or Python "
        "on a node, several hosts without a token."
    )
    advice = "Mend each point of the list and start again."


class PlacementError(ClusterError):
    """A region's workers or servers could not be placed before the deadline."""

    code = "PLACEMENT_INFEASIBLE"
    causes = (
        "Fewer free CPUs, GPUs or memory in that region than the configuration asks for; nodes "
        "that have left."
    )
    advice = "Add nodes with the region's label, or ask for fewer workers or CPUs there."


class PortInUseError(ClusterError):
    """A port that was asked for by number is taken."""

    code = "PORT_IN_USE"
    causes = "Another run on the same machine, or a process of an earlier one that has not ended."
    advice = "Choose another port, or 0 for any free one."


class ClusterStateError(ClusterError):
    """What is written down of a cluster does not allow what was asked."""

    code = "CLUSTER_STATE"
    causes = (
        "There is no cluster of that name, it is being taken down, or it was made of another "
        "configuration."
    )
    advice = "`geo-ray up CONFIG` makes one; `geo-ray status CLUSTER` shows how one stands."


class ClusterNameTakenError(ClusterError):
    """Machines of another cluster of the same name live in the same account."""

    code = "CLUSTER_NAME_TAKEN"
    causes = (
        "Somebody else's cluster has the name, or one that was made with another `provider.state`, "
        "or the folder in which it was written down is lost."
    )
    advice = (
        "Give this cluster another `name`; or take the other one down first, with `geo-ray down` "
        "and its own state. If that is lost, end its machines in the cloud's own console: they "
        "bear the tags geo-ray:cluster and geo-ray:cluster-id."
    )


class ClusterBusyError(ClusterError):
    """Another command makes or ends the cluster, and does not come to its end."""

    code = "CLUSTER_BUSY"
    causes = "Another `geo-ray up` or `geo-ray down` of the same cluster."
    advice = "Wait for that command, or end it and repeat this one: both may be repeated."


class MachinesLeftError(ClusterError):
    """Machines or secrets of a cluster that was taken down are still there."""

    code = "MACHINES_LEFT"
    causes = "The cloud refuses to end them, does not answer, or takes long."
    advice = "Repeat `geo-ray down`; what stays has to be ended in the cloud's own console."


class TransportError(GeoRayError):
    """Something is wrong between processes or regions."""

    code = "TRANSPORT"
    exit_code = 6
    chapter = "Wide-area network"
    causes = "See the codes of this chapter."
    advice = "Check the address and the network that the message names."


class FrameError(TransportError):
    """Received bytes are no valid frame.

    They were dropped before anything was decoded.
    """

    code = "FRAME_INVALID"
    causes = (
        "Another program talks to the port, the two ends run different releases, memory or a "
        "network device corrupts data."
    )
    advice = "Check that both ends run the same release and nothing else talks to this port."


class PeerRefusedError(TransportError):
    """The peer belongs to another run, speaks another protocol version or has no valid key."""

    code = "PEER_REFUSED"
    causes = (
        "A process of an earlier run that is still alive, a mixture of releases, a forged or "
        "stolen address, a certificate that expired or was revoked."
    )
    advice = "End processes of earlier runs, and start all regions from one release."


class CertificateError(TransportError):
    """A certificate or private key on this side cannot be read, written or used."""

    code = "CERTIFICATE_INVALID"
    causes = (
        "A missing or unreadable file, a key that belongs to another certificate, an encrypted "
        "key, an expired CA, a file that exists already and would have been replaced, a revocation "
        "list that the deployment's CA has not signed, a CA whose replacing is ended too early; at "
        "the start of a run, a certificate in `transport.certs` that another region would not "
        "take. A "
        "certificate of the *other* side that is refused is a `PEER_REFUSED`."
    )
    advice = "Issue or renew it: `geo-ray certs show DIR` lists what a deployment has."


class LinkDownError(TransportError):
    """A peer could not be reached before the deadline."""

    code = "LINK_DOWN"
    causes = "A route, firewall or security group between the regions, an outage, a dead machine."
    advice = (
        "Check routes and firewalls between the two regions; a run can be resumed from its "
        "checkpoint."
    )
    more = "The bridge's port must be open from the other region."


class LinkUnknownError(TransportError):
    """The link table has no record of a pair of regions that is needed."""

    code = "LINK_UNKNOWN"
    causes = (
        "A region that was added after the probe, a probe of that pair that failed, a table of "
        "another deployment, records that were too old to be used."
    )
    advice = "Measure it with `geo-ray probe`, or name a link table that has the pair."
    more = (
        "`geo-ray probe` takes the configuration, or runs between two hosts, and writes "
        "`links.json`."
    )


class ReferenceLostError(TransportError):
    """An update is a difference from an answer that the averager does not remember."""

    code = "REFERENCE_LOST"
    causes = (
        "The averager was replaced by one that had not seen that answer. The sender repeats the "
        "update in full, so this code appears in logs only."
    )
    advice = "Do nothing: the sender hears of it and sends the same update in full."
    more = "If it is logged at every exchange, report it with the run directory."


class DeadlineExceededError(TransportError):
    """A wait reached its deadline.

    Waits for machines and links have one; waits for others' training only with
    `train.step_timeout_s`.
    """

    code = "DEADLINE_EXCEEDED"
    causes = "Work that is slower than the deadline allows, or a process that is frozen."
    advice = (
        "Raise the named deadline if the work is really that slow; otherwise look for what hangs."
    )


class CheckpointError(GeoRayError):
    """Something is wrong with checkpoints."""

    code = "CHECKPOINT"
    exit_code = 7
    chapter = "Checkpoint"
    causes = "A save that broke the store's rules, such as a part with a name that is not allowed."
    advice = "docs/design/checkpoint-format.md has the files and the order of a save."


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are not what their manifest says, and no whole one is left.

    Training is never started anew by accident.
    """

    code = "CHECKPOINT_CORRUPT"
    causes = (
        "A damaged disk, files that were edited, copied in part or deleted. A machine or process "
        "that died during a save does *not* cause this: an unfinished save is invisible."
    )
    advice = (
        "Resume again: `--resume` passes over a damaged checkpoint and takes the newest whole one."
    )
    more = (
        "The resume logs what was wrong with newer ones. If none is whole, restore the "
        "`checkpoints/` directory from a backup, or start anew."
    )


class CheckpointConflictError(CheckpointError):
    """Another writer saves the checkpoints of this run, and came first.

    What it has saved stays as it is; of two writers of one checkpoint at most one succeeds.
    """

    code = "CHECKPOINT_CONFLICT"
    causes = (
        "The run was resumed elsewhere while this one was still going, or was cut off from whoever "
        "resumed it; two runs of one name with the same `checkpoint.store`."
    )
    advice = "Find the other run and let one of the two end; then resume the one that is left."
    more = "Runs that have nothing to do with each other need other names or another prefix."


class CheckpointMissingError(CheckpointError):
    """There is nothing to take up: no checkpoint, or not the one that was named."""

    code = "CHECKPOINT_MISSING"
    causes = (
        "The wrong run directory, the number of a checkpoint that is not there or was removed to "
        "make room, a run that ended before its first checkpoint, a run that was simulated."
    )
    advice = "Start without --resume, or name the right run directory."
    more = "A run that has taken all its steps is told of as `RUN_FINISHED`."


class ConfigChangedError(CheckpointError):
    """The configuration differs from the one that the checkpoint was made with."""

    code = "CONFIG_CHANGED"
    causes = (
        "An edited CONFIG, a release with other defaults, or a task, strategy or codec of your own "
        "whose file has changed. The message lists each difference. Other codecs, regions "
        "or numbers of parameter server shards than the checkpoint's are refused even if the "
        "difference is allowed: what is owed under one codec means nothing to another, and a "
        "checkpoint is not cut anew."
    )
    advice = (
        "Leave CONFIG out to go on as the run was, or name each change that is meant with "
        "--allow-change KEY."
    )
    more = (
        "What the run goes by is in its `config.lock.yaml`; a difference that was allowed is "
        "written there. For other codecs, regions or shards begin a new run."
    )


class RunError(GeoRayError):
    """A run ended early."""

    code = "RUN"
    exit_code = 8
    chapter = "Run"
    causes = "See the codes of this chapter."


class RunDirectoryError(RunError):
    """A run directory, or a file in it, cannot be written or read.

    Files that were being written have been removed; the last good checkpoint is untouched.
    """

    code = "RUN_DIRECTORY"
    causes = (
        "A full disk, a quota, a read-only file system, missing permissions, a file that is in the "
        "way, a directory that is no run."
    )
    advice = "Free space or choose another `run.dir`."


class RunFinishedError(RunError):
    """The run that is to go on has taken all its steps, or met its target."""

    code = "RUN_FINISHED"
    causes = (
        "`--resume` of a run that is finished, with nothing that asks for more of it; a change of "
        "members that was asked of it."
    )
    advice = "Take its model, or train it further with more steps."
    more = (
        "The message says where its model is, and the command that trains it further. A script "
        "that resumes a run until it is finished may take this code for success."
    )


class RegionLostError(RunError):
    """A region's parameter server or bridge died, and the run cannot go on without it."""

    code = "REGION_LOST"
    causes = "A machine that was reclaimed or crashed, memory that ran out."
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = "The region needs machines again before that."


class WorkerLostError(RunError):
    """Workers died more often than `train.max_worker_restarts` allows."""

    code = "WORKER_LOST"
    causes = (
        "Memory that runs out is the usual one; a crash in the task's code or in a native library "
        "is another."
    )
    advice = (
        "Read the worker's log for the cause; if memory ran out, use a smaller `data.batch_size` "
        "or fewer workers."
    )
    more = (
        "The logs of a local cluster are kept in the run's `logs` folder. With `train.elastic` a "
        "region goes on with the workers that are left."
    )


class AveragerFailedError(RunError):
    """The averager met an error that it cannot go on after; every region is told at once."""

    code = "AVERAGER_FAILED"
    causes = (
        "A strategy that raised while it combined updates; a message between regions that could "
        "not be handled."
    )
    advice = (
        "Read the traceback in the log of the named region's bridge; what was committed before is "
        "in the last checkpoint."
    )
    more = (
        "The message names the exception and its line. Errors of a class of your own have a code "
        "of their own, `OWN_CODE`."
    )


class StalledError(RunError):
    """Every region waits for the averager, and the averager for none that makes progress."""

    code = "STALLED"
    causes = "A strategy that leaves a region without an answer that it was to give."
    advice = (
        "Check when the strategy answers: each update needs an answer, at once or in the answers "
        "to a later one."
    )
    more = (
        "No length of time leads to this: a slow step, a slow link or a long round is waited for. "
        "What is needed is that no worker computes and no answer is on its way."
    )


class RunHeldError(RunError):
    """Another process drives the run: it holds the run's lease and renews it."""

    code = "RUN_HELD"
    causes = (
        "A second `geo-ray train --resume RUN` of a run that is going on, in another terminal, on "
        "another machine, or by a job server that started it again too early."
    )
    advice = "Stop the other one first, or wait until it has ended."
    more = (
        "Nothing was written to the run. A process that is killed gives its lease up at once if "
        "the next one starts on its machine, and after 12.5 s without a renewal anywhere else."
    )


class RunActorMissingError(RunError):
    """A change of members was requested for a run that has no run actor."""

    code = "RUN_ACTOR_MISSING"
    causes = "The run was stopped, has failed, or lost its processes."
    advice = "Start it first: `geo-ray train --resume RUN`."
    more = "The request was not stored, so a resume does not carry it out later."


class MembersRefusedError(RunError):
    """Whoever drives the run refuses a change of its members; the run goes on as before."""

    code = "MEMBERS_REFUSED"
    causes = (
        "A region that takes part already, or does not; one that hosts the averager where nobody "
        "stands by for it; fewer regions than `members.min` would be left; a run that is about to "
        "end; overlays, transfers or `dgt`, whose regions must all be there."
    )
    advice = "See who takes part with `geo-ray members RUN`."
    more = "The message has the reason; docs/guides/membership.md has the rules."


class LeaseLostError(RunError):
    """Another process has taken the run over, so this one writes nothing to it any more."""

    code = "LEASE_LOST"
    causes = (
        "A process that stood still for longer than its lease lives (a suspended machine, a "
        "stopped process, a file system that hung) while somebody resumed the run elsewhere."
    )
    advice = "Nothing is to be done: the run goes on where the message says."
    more = "Events and checkpoints since the takeover are those of the other process alone."


class RunActorLostError(RunError):
    """The run's supervisor is gone, or its run actor died again and again."""

    code = "RUN_ACTOR_LOST"
    causes = (
        "The node where the run was started went down, memory ran out there, or code of the task "
        "crashes the run actor's process."
    )
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = (
        "A run actor that dies is started again and continues with the run's processes: up to 20 "
        "times, and up to 3 times in a row before the run trains."
    )


class HeadLostError(RunError):
    """The head of the Ray cluster does not answer any more."""

    code = "HEAD_LOST"
    causes = "The head's machine went down, or its processes were killed and not started again."
    advice = "Start the cluster again, then `geo-ray train --resume RUN`."
    more = (
        "Training goes on without the head for a while. Ray ends every process of a node that has "
        "not reached the head for `RAY_gcs_rpc_server_reconnect_timeout_s`, 60 s unless it is set; "
        "after half of that the run is saved and ended. A head with its state on disk that is "
        "back by then is no trouble at all."
    )


class InterruptedRunError(RunError):
    """The user or the job server stopped the run."""

    code = "INTERRUPTED"
    exit_code = 130
    causes = "Ctrl-C, a termination signal, `ray job stop`."
    advice = "Resume with `geo-ray train --resume RUN`."
    more = (
        "Nothing is broken, so the terminal shows `stopped:` and the message instead of `error` "
        "and the code."
    )


class LabError(GeoRayError):
    """The WAN lab does not come up, or is used while it is not up."""

    code = "LAB"
    exit_code = 9
    chapter = "WAN lab"
    causes = "The kernel refuses a namespace, a device or a setting; the relay's process ended."
    advice = "Read the message; `geo-ray lab down` removes what a crashed lab has left."


class LabUnavailableError(LabError):
    """This machine, or this user, cannot have a WAN lab."""

    code = "LAB_UNAVAILABLE"
    causes = (
        "Not root, no `/dev/net/tun`, no `ip` or `nsenter`, another system than Linux, or a "
        "congestion control that the kernel lacks."
    )
    advice = "Run as root on Linux with /dev/net/tun; without, `emulate:` shapes a run's own links."
    more = "A container needs `--privileged --device /dev/net/tun`."


class LabUnknownError(LabError):
    """A command is meant for a lab that is not up, or several are up and none is named."""

    code = "LAB_UNKNOWN"
    causes = "The lab was taken down, another id, two labs at the same time."
    advice = "`geo-ray lab status` lists the labs that are up; name one with --lab."


class LabDownError(LabError):
    """The relay of the lab does not answer any more."""

    code = "LAB_DOWN"
    causes = "Its process was ended, or the machine is so loaded that it gets no time."
    advice = "Remove what is left with `geo-ray lab down`, then bring the lab up again."


class LabLateError(LabError):
    """Packets were forwarded later than the links' round trips allow.

    docs/guides/wan-lab.md has the rule.

    What was measured meanwhile says more about the machine than about the links, and is
    rejected.
    """

    code = "LAB_LATE"
    causes = (
        "Too few cores for the relay and what runs in the lab, a host that gives the machine's "
        "cores to others (stolen time), or rates beyond what the relay carries "
        "(docs/guides/wan-lab.md). "
        "The message says what the relay did itself and what the kernel counted."
    )
    advice = (
        "Leave the relay a core, lower the rates or the number of regions, and measure again; "
        "where cycles are stolen, repeat the run."
    )


class PlanError(GeoRayError):
    """No plan could be made, or it cannot be followed."""

    code = "PLAN"
    exit_code = 10
    chapter = "Prices and plans"
    causes = "See the codes of this chapter."
    advice = "Make a plan of this configuration with `geo-ray plan`."


class PriceBookError(PlanError):
    """A file of prices cannot be read, or a record in it contradicts itself."""

    code = "PRICES_INVALID"
    causes = (
        "A negative or missing amount, a unit that does not fit the item, tiers that do not rise, "
        "an edit by hand."
    )
    advice = "Correct what is named; docs/guides/planning.md describes the file."


class PriceUnknownError(PlanError):
    """The plan needs a price that is in no file.

    A missing price is never taken to be 0.
    """

    code = "PRICE_UNKNOWN"
    causes = (
        "A type or a pair of regions that the shipped snapshot does not have, a cloud whose prices "
        "come from you."
    )
    advice = "Fetch it with `geo-ray prices refresh`, or add a record to your file of prices."


class CurrencyError(PlanError):
    """A price is in a currency without an exchange rate."""

    code = "CURRENCY_UNKNOWN"
    causes = "Prices of several clouds, and no rate in your file: rates change, so none is shipped."
    advice = "Add a dated exchange rate to your file of prices; docs/guides/planning.md shows one."


class PlanInfeasibleError(PlanError):
    """No plan meets every constraint.

    The message says which one stands in the way, and what the nearest plan would be.
    """

    code = "PLAN_INFEASIBLE"
    causes = (
        "A deadline or a budget that is too tight, caps of 0, residency rules that forbid what the "
        "data's place demands. The policies that look at neither deadline nor budget are refused "
        "when their plan exceeds them."
    )
    advice = "Relax the constraint that is named."
    more = "Where the message has a number to set, it is rounded up: with it there is a plan."


class ProfileError(PlanError):
    """A profile cannot be made, read or used."""

    code = "PROFILE_INVALID"
    causes = (
        "A file that is no profile; runs too short to measure a step, or the loss of an interval; "
        "no point for a machine type that the plan may rent; plain training that diverges."
    )
    advice = "Measure anew with `geo-ray profile`."
    more = (
        "Where a region could rent several types, say which one was measured with `--machine "
        "REGION=TYPE`."
    )


class OtherModelError(PlanError):
    """A profile, a measured loss or a plan is of another model or task than the configuration's.

    The message says in what they differ.
    """

    code = "OTHER_MODEL"
    causes = (
        "Options or file of the task have changed since; for a measured loss, the data, the "
        "regions or the strategy."
    )
    advice = "Measure and plan this configuration: `geo-ray profile`, then `geo-ray plan --out`."


class ExtrapolationError(PlanError):
    """A plan needs batches or numbers of workers beyond those that were measured."""

    code = "EXTRAPOLATION"
    causes = "A profile of a small cluster, a plan for a large one."
    advice = "Measure there with `geo-ray profile`, or accept the guess with --extrapolate."
    more = "`geo-ray profile` takes `--workers` and `--batch-sizes`."


class CloudError(GeoRayError):
    """A cloud refused a request, or its answer makes no sense."""

    said: str = ""
    """The cloud's own code of the refusal, if it sent one."""

    code = "CLOUD"
    exit_code = 11
    chapter = "Clouds"
    causes = "Wrong credentials, a region that is not enabled, a right that is missing."
    advice = "Read what the cloud said; credentials and regions are the usual causes."


class CloudUnreachableError(CloudError):
    """A cloud did not answer, or only asked to slow down, until the last try."""

    code = "CLOUD_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling."
    advice = "Try again later, or check the network and the endpoint."
    more = "Prices that were known stay as they were."


class ProviderRefusedError(CloudError):
    """A cloud will not do what was asked with machines or secrets, however often it is asked."""

    code = "PROVIDER_REFUSED"
    causes = (
        "Wrong or expired credentials, a missing permission, a machine image that is not there."
    )
    advice = (
        "Give the account the permission that the message names; "
        "docs/operations/cloud-accounts.md lists all."
    )


class ProviderUnreachableError(CloudUnreachableError):
    """Whether a cloud did what was asked with machines or secrets is not known."""

    code = "PROVIDER_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling, a time limit."
    advice = "Ask again with the same request id, which is safe; look at what the cloud lists."


class RegionsUnreachableError(ProviderUnreachableError):
    """Some regions did not answer; the error carries the answers of the others."""

    found: tuple[Any, ...] = ()
    """Answers of the reachable regions."""

    unreachable: Mapping[str, str] = MappingProxyType({})
    """Reason by region, for the regions without an answer."""

    code = "REGIONS_UNREACHABLE"
    causes = "A cloud or a region is down, the network path is broken, or credentials have expired."
    advice = "Check that the region is up and that its credentials are valid, then retry."
    more = "The autoscaler makes no changes in such a region and continues with all others."


class TerraformOutputsError(CloudError):
    """What Terraform made cannot be read from its outputs."""

    code = "TERRAFORM_OUTPUTS"
    causes = (
        "Nothing was applied there, another directory, outputs that were edited or are of another "
        "release, no program terraform."
    )
    advice = (
        "Name the directory of a stack of infra/terraform after `terraform apply`, or a file of "
        "`terraform output -json`."
    )


class TuningError(GeoRayError):
    """A search could not be made, or nothing came of it."""

    code = "TUNING"
    exit_code = 13
    chapter = "Tuning"
    causes = "See the codes of this chapter."
    advice = "Read the message; the directory of the search has the results of every trial."


class SearchMissingError(TuningError):
    """The search algorithm that was asked for is not installed."""

    code = "SEARCH_MISSING"
    causes = "`search: {kind: optuna}` or `{kind: hyperopt}` without that package."
    advice = "Install it, `pip install 'geo_ray[search]'`, or take `search: {kind: random}`."


class TrialsFailedError(TuningError):
    """All trials failed: there is no best one.

    The message has what the first of them ended with.
    """

    code = "TRIALS_FAILED"
    causes = (
        "Learning rates with which every run diverges, a space in which no values go together, a "
        "task or data that cannot be loaded."
    )
    advice = "Train the base configuration by itself first; then narrow the space."


class TuningDirectoryError(TuningError):
    """The directory of a search cannot be used: it is there already, or it holds another search.

    Nothing in it was changed.
    """

    code = "TUNING_DIRECTORY"
    causes = (
        "A second search of the same name; `--resume` of a search whose base, space or objectives "
        "have changed since, or of a directory that is no search."
    )
    advice = "Go on with it by `--resume`, or name another directory with `--out`."


class SchedulingError(GeoRayError):
    """Jobs cannot be scheduled on a shared cluster."""

    code = "SCHEDULING"
    exit_code = 14
    chapter = "Scheduling"
    causes = "See the codes of this chapter."
    advice = (
        "Correct what is named; docs/reference/scheduling-policies.md describes "
        "jobs, clusters and policies."
    )


class ScheduleInputError(SchedulingError):
    """A cluster or a job of it contradicts itself, or they do not fit each other."""

    code = "SCHEDULE_INPUT"
    causes = (
        "A job that is larger than the cluster, data in a region that has no site, negative times, "
        "two jobs of one name, a link without goodput."
    )
    advice = "Correct what is named, or give the cluster more with --machines or --regions."


class TraceError(SchedulingError):
    """A trace of jobs cannot be read."""

    code = "TRACE_INVALID"
    causes = (
        "A file of another format than --format says, columns that are missing, times that are "
        "negative or no numbers, an empty file."
    )
    advice = (
        "Correct the file where it says, or name its format with --format (by default philly); "
        "docs/reference/scheduling-policies.md lists the columns of each."
    )


class QueueError(GeoRayError):
    """The queue cannot do what it was asked."""

    code = "QUEUE"
    exit_code = 15
    chapter = "Queue"
    causes = "See the codes of this chapter."
    advice = "Read the message; `geo-ray queue list QUEUE` shows how the queue stands."


class QueueMissingError(QueueError):
    """There is no queue where one was named, or nobody serves it."""

    code = "QUEUE_MISSING"
    causes = "Another directory or address than the one that the queue's `state` names, or a typo."
    advice = "Start it with `geo-ray queue start CONFIG` on the cluster, or name its folder."


class QueueJournalError(QueueError):
    """What a queue has written down cannot be understood."""

    code = "QUEUE_JOURNAL"
    causes = "It was written by a later release, or somebody changed a file of it."
    advice = "Use the release of geo_ray that wrote it, or restore the folder."


class QueueDeniedError(QueueError):
    """Who asks may not have that done."""

    code = "QUEUE_DENIED"
    causes = (
        "A token of another queue or tenant, a tenant that the queue's configuration does not "
        "have, a job of another tenant, a job moved ahead of another tenant's."
    )
    advice = "Ask with the token of the job's tenant, or have an operator of the queue do it."


class QueueRequestError(QueueError):
    """What is asked makes no sense for this queue."""

    code = "QUEUE_REQUEST"
    causes = (
        "A job that is not there or has ended, a name that is taken, a job that is larger than "
        "the cluster, a region that the queue does not have."
    )
    advice = "Correct what is named; `geo-ray queue list QUEUE` shows the jobs."


class TenantQuotaError(QueueError):
    """A tenant has as much in the queue as its configuration allows."""

    code = "TENANT_QUOTA"
    causes = "More jobs, more workers for one job, or more worth than the tenant's quota."
    advice = "Wait for a job to end, cancel one, or ask for less."


class SpeedUnknownError(QueueError):
    """How fast a job is cannot be told, so no slot can be planned for it."""

    code = "SPEED_UNKNOWN"
    causes = "No profile of the task was found, and nobody said how fast a worker is."
    advice = "Measure it with `geo-ray profile CONFIG`, or say it with --rows-per-s."


class ValueTooLowError(QueueError):
    """A job was turned away: what it is worth does not pay for what it takes from others."""

    code = "VALUE_TOO_LOW"
    causes = "The cluster is full of worthier jobs, or the deadline cannot be kept."
    advice = "Submit it again later, with more worth, or with a later deadline."


class JobOverranError(QueueError):
    """A job took far longer than its own numbers say."""

    code = "JOB_OVERRAN"
    causes = "It is slower than it said, or others on its machines take their time."
    advice = "Measure its speed with `geo-ray profile`, then go on with --resume."


class JobStalledError(QueueError):
    """A job had machines and took no step for too long."""

    code = "JOB_STALLED"
    causes = "Machines that do not come, a link that is down, a task that hangs."
    advice = "Look at its run with `geo-ray status RUN`, then submit it again."


class JobFailedError(QueueError):
    """A job failed again and again."""

    code = "JOB_FAILED"
    causes = "The run's own error, which the message names."
    advice = "Mend what the run's error says, then submit it again."


class ProgramError(GeoRayError):
    """A job written as a program cannot run."""

    code = "PROGRAM"
    exit_code = 16
    chapter = "Programs"
    causes = "See the codes of this chapter."
    advice = "Correct what is named; docs/guides/programs.md describes programs and their nodes."


class ProgramInvalidError(ProgramError):
    """A program contradicts itself."""

    code = "PROGRAM_INVALID"
    causes = (
        "Two nodes of one name, a handle of a node that is not there, replicas below one, handles "
        "that lead in a circle."
    )
    advice = "Correct the group or the node that is named."


class ProgramRegionError(ProgramError):
    """A program names a region that is not there."""

    code = "PROGRAM_REGION"
    causes = (
        "A misspelt region in a group, a link or a place; a cluster without nodes of that label."
    )
    advice = "Correct the region, or give nodes of the cluster its label."


class ProgramLoadError(ProgramError):
    """A file has no program that could be taken from it."""

    code = "PROGRAM_LOAD"
    causes = "A misspelt name, a file without a program, or one with several."
    advice = "Name the program: FILE.py:name, a `Program` or a function that returns one."


class ProgramStalledError(ProgramError):
    """On the virtual clock nothing can happen any more, and the program has not ended."""

    code = "PROGRAM_STALLED"
    causes = "A node that waits for what nobody will do."
    advice = "Look at what the named nodes wait for."


class NodeFailedError(ProgramError):
    """A node of a program raised, or its process ended, more often than its group allows."""

    code = "NODE_FAILED"
    causes = "An exception in the node's own code; its process was killed or ran out of memory."
    advice = "Read the node's own traceback in the message; allow restarts with `restarts`."


class NodeCallError(ProgramError):
    """A method of a node raised while it answered a call; the node goes on."""

    code = "NODE_CALL"
    causes = "An exception in the method, a method that is not there, arguments that do not fit."
    advice = "Read the node's own traceback in the message."


class NodeLostError(ProgramError):
    """A node's process ended while a call was under way, so nobody knows what came of the call."""

    code = "NODE_LOST"
    causes = "The process was killed or ran out of memory, or its machine is gone."
    advice = "Call again if the call may be carried out twice: a node that is restarted answers."


class NodeEndedError(ProgramError):
    """A call to a node of a program that has ended."""

    code = "NODE_ENDED"
    causes = "A caller that was kept for longer than its program runs."
    advice = "Call nodes while the program runs, and return from `run` what is needed later."


class NodeUnshippableError(ProgramError):
    """A node's function or its arguments cannot be sent to another process."""

    code = "NODE_UNSHIPPABLE"
    causes = (
        "A lambda, a class defined inside a function, an argument that holds a lock or a socket."
    )
    advice = "Define the node at the top of a module and give it plain values, or run in threads."


class ValueUnshippableError(ProgramError):
    """A value cannot be sent from node to node."""

    code = "VALUE_UNSHIPPABLE"
    causes = "An object of a class of one's own, a set, an open file, an array of objects."
    advice = (
        "Send None, numbers, texts, bytes, lists, tuples, dictionaries, NumPy arrays and tensors."
    )
