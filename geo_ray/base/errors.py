"""The error hierarchy of geo_ray.

Every error has a stable code, a process exit code, and advice on how to fix it. Each class holds
the text of its section in `docs/reference/generated/errors.md`, which
`geo_ray.testing.reference_pages` generates. All classes are in this module, so that `from_code`
finds an error by its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class GeoRayError(Exception):
    """Base class of all errors of geo_ray.

    Args:
        message: the cause, naming the key, shard, region or file.
        fix: a remedy that is more specific than the class's general advice.

    Attributes:
        code: stable name of the error; it does not change between releases.
        exit_code: exit code of the process.
        chapter: heading of the error's section in `docs/reference/generated/errors.md`.
        causes: usual causes.
        advice: general remedy; shown when the message has no `fix`.
        more: further information; shown in `docs/reference/generated/errors.md` only.
    """

    code: ClassVar[str] = "GEO_RAY"
    exit_code: ClassVar[int] = 1
    chapter: ClassVar[str] = ""
    causes: ClassVar[str] = (
        "Never raised directly; this code means that a more specific one is missing."
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
    """Return all error classes, parents before their children."""
    kinds: list[type[GeoRayError]] = [GeoRayError]
    for kind in kinds:  # grows during the iteration
        kinds += kind.__subclasses__()
    return kinds


def from_code(code: str, message: str, fix: str | None) -> GeoRayError:
    """Return the error with this code; a `GeoRayError` if this release does not know the code."""
    found = next((kind for kind in every_class() if kind.code == code), GeoRayError)
    return found(message, fix=fix)


def _rebuild(kind: type[GeoRayError], message: str, fix: str) -> GeoRayError:
    return kind(message, fix=fix)


class InvariantError(GeoRayError):
    """An internal invariant does not hold; this is a bug of geo_ray."""

    code = "INVARIANT"
    exit_code = 70
    chapter = "Bugs"
    causes = "Unknown, by definition. The message names the invariant that does not hold."
    advice = "Report it with the run directory; the message names the invariant."
    more = "The run directory contains everything needed to find the cause."


class ConfigError(GeoRayError):
    """The configuration is invalid.

    No process was started, no machine was rented and no file was written.
    """

    code = "CONFIG_INVALID"
    exit_code = 2
    chapter = "Configuration"
    causes = (
        "An unknown or misspelt key, a wrong type, a number out of range, a missing value, two "
        "keys that contradict each other, a duplicate key, invalid YAML or YAML with tags, "
        "anchors, NaN or infinities, a `--set` that is not `key.key=value`, a file that is "
        "missing, "
        "larger than 1 MB or not UTF-8."
    )
    advice = (
        "Correct the key that the message names; `geo-ray config schema KEY` shows its valid "
        "values."
    )
    more = (
        "The message lists every problem at once: the path of the key, its line (or `--set`), the "
        "value, the expected value and the nearest valid key or value. `geo-ray config schema` "
        "lists every key. Numbers such as `1e-3` need no quotes; `no`, `on` and `12:30` are text, "
        "as in YAML 1.2."
    )


class DataError(GeoRayError):
    """The training data cannot be used."""

    code = "DATA"
    exit_code = 3
    chapter = "Data"
    causes = "See the codes of this chapter."
    advice = "Correct the file or the folder that the message names."


class ShardCorruptError(DataError):
    """The SHA-256 or size of a shard differs from the manifest.

    None of its rows were used.
    """

    code = "DATA_CORRUPT"
    causes = (
        "A damaged or truncated file, an incomplete upload, a shard that was overwritten "
        "after the manifest was made."
    )
    advice = "Restore the shard from its source, or write the data again with `geo-ray data shard`."


class ShardMissingError(DataError):
    """A shard of the manifest is missing from its region's store."""

    code = "DATA_MISSING"
    causes = (
        "The store address names another bucket or directory, the shard was never uploaded or was "
        "deleted by a life-cycle rule, or the credentials do not allow listing it."
    )
    advice = "Check the store's address and credentials, then that the shard was uploaded."
    more = "The address is under `stores` in the manifest."


class SchemaMismatchError(DataError):
    """The columns, types or lengths of a shard differ from the manifest or the task."""

    code = "DATA_SCHEMA"
    causes = (
        "Data written for another task or another version of it, a column with nulls, a list "
        "column whose rows differ in length, or a column type that geo_ray rejects because "
        "decoding it could execute code."
    )
    advice = "Write the shard with the columns and types that the task declares."


class DataLeftOutError(DataError):
    """The input contains a file or folder that would be skipped, and ``--strict`` forbids that."""

    code = "DATA_LEFT_OUT"
    causes = (
        "A file suffix that geo_ray does not read, a compression that it does not unpack, a "
        "link to a folder, a folder without read permission, a file without rows."
    )
    advice = "Move files that are not data out of the input, or omit `--strict`."


class ShardEmptyError(DataError):
    """A shard, or all data of a region, has no rows."""

    code = "DATA_EMPTY"
    causes = (
        "More regions than rows, a skewed split that leaves a region without rows, or a region of "
        "the configuration that the manifest does not contain."
    )
    advice = (
        "Add data to the region, remove it from the configuration, or choose a less skewed split."
    )


class RegionsOmittedError(DataError):
    """The manifest has rows of regions that the configuration does not list."""

    code = "REGIONS_OMITTED"
    causes = (
        "A region that is missing from the configuration or has another name there, or a run that "
        "uses only part of the regions on purpose."
    )
    advice = "Add the regions to `regions`, or name them in `data.leave_out`."


class ResidencyDeniedError(DataError):
    """A process requested a shard of another region.

    The request was refused before any byte was read.
    """

    code = "RESIDENCY_DENIED"
    causes = (
        "A `region` in the manifest that does not match the shard's location, or a node with the "
        "wrong `ray.io/availability-region` label."
    )
    advice = "Correct the node's label, or the `region` of the shard in the manifest."
    more = "This check cannot be turned off."


class StoreError(DataError):
    """An object store or file system does not answer, refuses a request, or is full."""

    code = "STORE"
    causes = (
        "A wrong endpoint or bucket name, expired or missing credentials, throttling that "
        "outlasted the retries, a full disk."
    )
    advice = "Check the endpoint, the credentials and the bucket name."
    more = "The cloud provider's command-line tool, run on the same machine, shows the cause."


class ManifestError(DataError):
    """A manifest cannot be read or is inconsistent."""

    code = "MANIFEST_INVALID"
    causes = (
        "A manual edit, a file of another kind, a manifest of a newer version of geo_ray, shard "
        "paths outside their store."
    )
    advice = "Write the manifest again with `geo-ray data shard`."


class TaskError(GeoRayError):
    """The task, which is user code, is invalid."""

    code = "TASK"
    exit_code = 4
    chapter = "Task"
    causes = "See the codes of this chapter."
    advice = "Correct the part of the task that the message names."


class TaskLoadError(TaskError):
    """The task cannot be imported, lacks a required method or attribute, or rejects an option."""

    code = "TASK_LOAD"
    causes = (
        "A misspelt file, module, class or option, an import that fails on this machine, a missing "
        "method, columns of an unknown type."
    )
    advice = "Correct what the message names; docs/guides/tasks.md lists what a task must define."
    more = (
        "The message names the nearest valid name. For a wrong option it lists the options of the "
        "task with their types and defaults; for a file that fails while it is imported it names "
        "the line."
    )


class TaskOutputError(TaskError):
    """The task's model, loss or evaluation has an invalid type or shape."""

    code = "TASK_OUTPUT"
    causes = (
        "A loss that is a vector, an integer or detached from the parameters; an evaluation that "
        "does not return one-dimensional float64 sums; model parameters that are not fp32, have "
        "no shape yet, share memory or cannot be saved; a loss scaled by a GradScaler; an "
        "exception in a method."
    )
    advice = (
        "Correct what the message names; the loss must be a scalar that depends on the parameters."
    )
    more = (
        "`evaluate` returns sums over the rows of a batch; docs/guides/tasks.md has an example of "
        "each."
    )


class TaskStateError(TaskError):
    """Non-trained values of the model change, or differ between processes."""

    code = "TASK_STATE"
    causes = (
        "A moving average of the weights, a queue, a codebook or spectral normalisation that the "
        "task does not declare; a pattern of `model_buffers` or `groups` that matches nothing; a "
        "frozen part read from different files on different machines; model buffers where updates "
        "are summed in transit; a loss that uses other parameters than the trained ones; "
        "`requires_grad` switched in the first steps."
    )
    advice = (
        "Declare values that change in the task's `model_buffers`; docs/guides/tasks.md has the "
        "rules."
    )
    more = (
        "Values that change in the forward pass without a gradient are exchanged between regions "
        "and saved in checkpoints and in the model only if the task names them. The message names "
        "them."
    )


class OwnCodeError(TaskError):
    """A custom strategy or codec raised an exception."""

    code = "OWN_CODE"
    causes = (
        "A mistake in the class that `strategy.use` or `codec.*.use` names: a missing attribute, "
        "tensors of different shapes, or an unhandled case."
    )
    advice = "Correct the named line; `geo-ray check FILE.py:CLASS` finds most such mistakes."
    more = (
        "The message names the class, the method and the line; docs/guides/custom-strategies.md "
        "describes each method."
    )


class NonFiniteError(TaskError):
    """A loss, gradient or update is NaN or infinite.

    It was refused before any parameter changed.
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
        "If single samples are bad, remove them from the data: the `step_refused` events name the "
        "region and the step."
    )


class ClusterError(GeoRayError):
    """The Ray cluster cannot be used."""

    code = "CLUSTER"
    exit_code = 5
    chapter = "Cluster"
    causes = "See the codes of this chapter."
    advice = "Read the message; `ray status` on the head node lists the cluster's resources."


class ClusterStartError(ClusterError):
    """The local cluster does not start."""

    code = "CLUSTER_START"
    causes = (
        "Too little memory or shared memory, ports in use, another Ray version on the path, a "
        "firewall on localhost."
    )
    advice = "Read the log that the message names; free memory or ports if they are exhausted."


class RayUnreachableError(ClusterError):
    """No Ray cluster answers at the configured address."""

    code = "RAY_UNREACHABLE"
    causes = (
        "The cluster is not running, the address or port is wrong, a firewall blocks the "
        "connection, or the token is missing."
    )
    advice = (
        "Start the cluster, or correct its address: `cluster.address` of a configuration, "
        "`--address` of a command. `cluster.kind: local` needs no existing cluster."
    )


class PreflightError(ClusterError):
    """The cluster does not meet the requirements of the run.

    No process of the run was started.
    """

    code = "PREFLIGHT"
    causes = (
        "A region without labelled nodes, too few CPUs, another version of geo_ray, Ray or Python "
        "on a node, or several hosts without a token."
    )
    advice = "Correct each item of the list and start again."


class PlacementError(ClusterError):
    """A region's workers or servers could not be placed before the deadline."""

    code = "PLACEMENT_INFEASIBLE"
    causes = (
        "Fewer free CPUs, GPUs or memory in that region than the configuration requests; nodes "
        "that have left."
    )
    advice = "Add nodes with the region's label, or request fewer workers or CPUs there."


class PortInUseError(ClusterError):
    """The requested port is in use."""

    code = "PORT_IN_USE"
    causes = "Another run on the same machine, or a process of an earlier run that still exists."
    advice = "Choose another port, or 0 for any free port."


class ClusterStateError(ClusterError):
    """The recorded state of a cluster does not allow the requested operation."""

    code = "CLUSTER_STATE"
    causes = (
        "No cluster has that name, it is being deleted, or it was created with another "
        "configuration."
    )
    advice = "`geo-ray up CONFIG` creates a cluster; `geo-ray status CLUSTER` shows its state."


class ClusterNameTakenError(ClusterError):
    """Machines of another cluster with the same name run in the same account."""

    code = "CLUSTER_NAME_TAKEN"
    causes = (
        "Another user's cluster has the name, a cluster with another `provider.state` has it, or "
        "the folder with the cluster's state was lost."
    )
    advice = (
        "Choose another `name`, or delete the other cluster first with `geo-ray down` and its own "
        "state. If that state is lost, terminate its machines in the cloud's console: they have "
        "the tags geo-ray:cluster and geo-ray:cluster-id."
    )


class ClusterBusyError(ClusterError):
    """Another command is creating or deleting the cluster and does not finish."""

    code = "CLUSTER_BUSY"
    causes = "Another `geo-ray up` or `geo-ray down` of the same cluster."
    advice = "Wait for that command, or end it and repeat this one: both can be repeated safely."


class MachinesLeftError(ClusterError):
    """Machines or secrets of a deleted cluster still exist."""

    code = "MACHINES_LEFT"
    causes = "The cloud refuses to delete them, does not answer, or takes long."
    advice = "Repeat `geo-ray down`; delete what remains in the cloud's console."


class TransportError(GeoRayError):
    """Communication between processes or regions fails."""

    code = "TRANSPORT"
    exit_code = 6
    chapter = "Wide-area network"
    causes = "See the codes of this chapter."
    advice = "Check the address and the network that the message names."


class FrameError(TransportError):
    """Received bytes are not a valid frame.

    They were dropped before any decoding.
    """

    code = "FRAME_INVALID"
    causes = (
        "Another program uses the port, the two ends run different releases, or memory or a "
        "network device corrupts data."
    )
    advice = "Check that both ends run the same release and that no other program uses this port."


class PeerRefusedError(TransportError):
    """The peer belongs to another run, speaks another protocol version or has no valid key."""

    code = "PEER_REFUSED"
    causes = (
        "A process of an earlier run that is still alive, credentials of another run, different "
        "releases, a forged or stolen address, a certificate that expired or was revoked."
    )
    advice = (
        "End processes of earlier runs, and use the same release in all regions. A region that "
        "joins needs the address and the credentials of the same run."
    )


class CertificateError(TransportError):
    """A local certificate or private key cannot be read, written or used."""

    code = "CERTIFICATE_INVALID"
    causes = (
        "A missing or unreadable file, a key that belongs to another certificate, an encrypted "
        "key, an expired CA, an existing file that would be replaced, a revocation list that is "
        "not signed by the deployment's CA, a CA rotation that is finished too early, or a "
        "certificate in `transport.certs` that another region would reject. A rejected "
        "certificate of the *peer* is a `PEER_REFUSED`."
    )
    advice = "Issue or renew it: `geo-ray certs show DIR` lists what a deployment has."


class LinkDownError(TransportError):
    """A peer could not be reached before the deadline."""

    code = "LINK_DOWN"
    causes = (
        "A missing route, a firewall or security group between the regions, an outage, a dead "
        "machine."
    )
    advice = (
        "Check routes and firewalls between the two regions; a run can be resumed from its "
        "checkpoint."
    )
    more = "The other region must be able to reach the bridge's port."


class LinkUnknownError(TransportError):
    """The link table lacks a record of a required pair of regions."""

    code = "LINK_UNKNOWN"
    causes = (
        "A region that was added after the probe, a failed probe of that pair, a link table of "
        "another deployment, or records that are too old."
    )
    advice = "Measure it with `geo-ray probe`, or use a link table that contains the pair."
    more = (
        "`geo-ray probe` takes the configuration, or runs between two hosts, and writes "
        "`links.json`."
    )


class ReferenceLostError(TransportError):
    """An update is encoded against an answer that the averager does not hold."""

    code = "REFERENCE_LOST"
    causes = (
        "The averager was replaced by one that had not received that answer. The sender repeats "
        "the update in full, so this code appears only in logs."
    )
    advice = "No action is needed: the sender is notified and sends the same update in full."
    more = "If the log shows it at every exchange, report it with the run directory."


class DeadlineExceededError(TransportError):
    """A wait reached its deadline.

    Waiting for machines and links has a deadline; waiting for other regions' training has one only
    with `train.step_timeout_s`.
    """

    code = "DEADLINE_EXCEEDED"
    causes = "Work that is slower than the deadline allows, or a frozen process."
    advice = (
        "Raise the named deadline if the work is that slow; otherwise find the process that hangs."
    )


class CheckpointError(GeoRayError):
    """A checkpoint cannot be saved or used."""

    code = "CHECKPOINT"
    exit_code = 7
    chapter = "Checkpoint"
    causes = "A save that violates the store's rules, such as a part with a forbidden name."
    advice = "docs/design/checkpoint-format.md describes the files and the order of a save."


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint differ from its manifest, and no complete checkpoint is left.

    A resume never restarts training from the beginning by accident.
    """

    code = "CHECKPOINT_CORRUPT"
    causes = (
        "A damaged disk, or files that were edited, partly copied or deleted. A machine or process "
        "that dies during a save does *not* cause this: an unfinished save is invisible."
    )
    advice = "Resume again: `--resume` skips a damaged checkpoint and uses the newest complete one."
    more = (
        "The resume logs the defects of newer checkpoints. If none is complete, restore the "
        "`checkpoints/` directory from a backup, or start again."
    )


class CheckpointConflictError(CheckpointError):
    """Another writer saves checkpoints of this run and was first.

    Its files stay unchanged; of two writers of one checkpoint at most one succeeds.
    """

    code = "CHECKPOINT_CONFLICT"
    causes = (
        "The run was resumed elsewhere while this process was still running or partitioned from "
        "the other one, or two runs of one name use the same `checkpoint.store`."
    )
    advice = "Find the other run and end one of the two; then resume the remaining one."
    more = "Independent runs need different names or different prefixes."


class CheckpointMissingError(CheckpointError):
    """The run has no checkpoint, or not the requested one."""

    code = "CHECKPOINT_MISSING"
    causes = (
        "The wrong run directory, a checkpoint number that does not exist or was removed to free "
        "space, a run that ended before its first checkpoint, or a simulated run."
    )
    advice = "Start without --resume, or name the right run directory."
    more = "A run that has taken all its steps is reported as `RUN_FINISHED`."


class CheckpointMismatchError(CheckpointError):
    """The state of a training loop does not fit the checkpoint that it loads.

    Nothing was changed.
    """

    code = "CHECKPOINT_MISMATCH"
    causes = (
        "Another model or optimizer than the saved one, a parameter that was added, removed or "
        "renamed, another data type, or names with the prefix of a wrapper (`module.`, "
        "`_orig_mod.`). The message names each key, what was expected and what was found."
    )
    advice = (
        "Build the model and the optimizer as they were when the checkpoint was saved; take their "
        "states with `get_state_dict` of `torch.distributed.checkpoint.state_dict`."
    )
    more = "World size and sharding may differ. `partial=True` loads only the keys of the state."


class ConfigChangedError(CheckpointError):
    """The configuration differs from that of the checkpoint."""

    code = "CONFIG_CHANGED"
    causes = (
        "An edited CONFIG, a release with other defaults, or a custom task, strategy or codec "
        "whose file has changed. The message lists each difference. Changes of codecs, regions or "
        "numbers of parameter server shards are refused even if they are allowed: encoder state "
        "cannot be converted to another codec, and a checkpoint cannot be divided again."
    )
    advice = (
        "Omit CONFIG to continue with the run's configuration, or allow each intended change with "
        "--allow-change KEY."
    )
    more = (
        "The run's `config.lock.yaml` holds its configuration, including differences that were "
        "allowed. For other codecs, regions or shards, start a new run."
    )


class RunError(GeoRayError):
    """A run ended early."""

    code = "RUN"
    exit_code = 8
    chapter = "Run"
    causes = "See the codes of this chapter."


class RunDirectoryError(RunError):
    """A run directory or one of its files cannot be read or written.

    Incomplete files were removed; the last good checkpoint is unchanged.
    """

    code = "RUN_DIRECTORY"
    causes = (
        "A full disk, a quota, a read-only file system, missing permissions, a file in place of a "
        "directory, or a directory that is not a run."
    )
    advice = "Free space or choose another `run.dir`."


class RunFinishedError(RunError):
    """The run has already taken all its steps, or reached its target."""

    code = "RUN_FINISHED"
    causes = (
        "`--resume` of a finished run without a request for more training, or a change of members "
        "of a finished run."
    )
    advice = "Use its model, or train it further with more steps."
    more = (
        "The message names the model and the command that trains it further. A script that resumes "
        "a run until it is finished may treat this code as success."
    )


class RegionLostError(RunError):
    """A region's parameter server or bridge died, and the run cannot continue without it."""

    code = "REGION_LOST"
    causes = "A machine that was preempted or crashed, or exhausted memory."
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = "The region needs machines again before the resume."


class WorkerLostError(RunError):
    """Workers died more often than `train.max_worker_restarts` allows."""

    code = "WORKER_LOST"
    causes = (
        "Exhausted memory is the usual cause; a crash in the task's code or in a native library "
        "is another."
    )
    advice = (
        "Read the worker's log for the cause; if memory is exhausted, use a smaller "
        "`data.batch_size` "
        "or fewer workers."
    )
    more = (
        "The logs of a local cluster are kept in the run's `logs` folder. With `train.elastic` a "
        "region continues with the remaining workers."
    )


class RankLostError(RunError):
    """A process of a region that is a group (`group`) died, and its group is not started again."""

    code = "RANK_LOST"
    causes = (
        "A process that was killed, a lost machine, or an error of the loop, more often than "
        "`train.max_worker_restarts` allows."
    )
    advice = "Read the log of the named process; correct its cause, and start the run again."
    more = "The other regions have continued, unless the message says that there was no other one."


class RankOutOfMemoryError(RankLostError):
    """A process of a region that is a group exhausted the memory of its machine or of its GPU."""

    code = "RANK_OUT_OF_MEMORY"
    causes = (
        "Model, optimizer, activations and rows of all ranks of a machine exceed its memory, and "
        "Ray ends a process; or those of a rank exceed the memory of its GPU."
    )
    advice = (
        "Use a smaller batch, `group.sharding: fsdp`, more machines (`group.nodes`), or fewer "
        "ranks per machine."
    )


class AveragerFailedError(RunError):
    """The averager failed and cannot continue; every region is notified at once."""

    code = "AVERAGER_FAILED"
    causes = (
        "A strategy that raised an exception while it combined updates, or a message between "
        "regions that could not be processed."
    )
    advice = (
        "Read the traceback in the log of the named region's bridge; earlier commits are "
        "in the last checkpoint."
    )
    more = (
        "The message names the exception and its line. Errors in custom classes have the code "
        "`OWN_CODE`."
    )


class StalledError(RunError):
    """Every region waits for the averager, and no update is in progress."""

    code = "STALLED"
    causes = "A strategy that does not answer an update."
    advice = (
        "Check when the strategy answers: each update needs an answer, immediately or together "
        "with the answer to a later update."
    )
    more = (
        "No duration triggers this error: slow steps, slow links and long rounds are waited for. "
        "It requires that no worker computes and no answer is in transit."
    )


class RunHeldError(RunError):
    """Another process runs the run: it holds and renews the run's lease."""

    code = "RUN_HELD"
    causes = (
        "A second `geo-ray train --resume RUN` of an active run, in another terminal, on "
        "another machine, or by a job server that restarted it too early."
    )
    advice = "Stop the other process first, or wait until it has ended."
    more = (
        "Nothing was written to the run. The lease of a killed process is released at once if the "
        "next process starts on the same machine, and otherwise 12.5 s after the last renewal."
    )


class RunActorMissingError(RunError):
    """A change of members was requested for a run that has no run actor."""

    code = "RUN_ACTOR_MISSING"
    causes = "The run was stopped, has failed, or lost its processes."
    advice = "Go on with it first: `geo-ray train --resume RUN`."
    more = "The request was not stored, so a resume does not carry it out later."


class MembersRefusedError(RunError):
    """The run actor refuses a change of the run's members; the run continues unchanged."""

    code = "MEMBERS_REFUSED"
    causes = (
        "A region that already takes part, or does not take part; the averager's region without a "
        "standby; fewer regions than `members.min` would remain; a run that is about to end; "
        "overlays, transfers or `dgt`, which need all their regions."
    )
    advice = "List the members with `geo-ray members RUN`."
    more = "The message states the reason; docs/guides/membership.md has the rules."


class LeaseLostError(RunError):
    """Another process has taken over the run; this process no longer writes to it."""

    code = "LEASE_LOST"
    causes = (
        "A process that was paused for longer than the lease is valid (a suspended machine, a "
        "stopped process, a file system that hung) while the run was resumed elsewhere."
    )
    advice = "No action is needed: the run continues where the message says."
    more = "Only the other process has written events and checkpoints since then."


class RunActorLostError(RunError):
    """The run's supervisor is gone, or its run actor died repeatedly."""

    code = "RUN_ACTOR_LOST"
    causes = (
        "The node where the run was started went down or ran out of memory, or the task's code "
        "crashes the run actor's process."
    )
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = (
        "A run actor that dies is restarted and continues with the run's processes: up to 20 "
        "times, and up to 3 times in a row before the first step."
    )


class HeadLostError(RunError):
    """The head of the Ray cluster no longer answers."""

    code = "HEAD_LOST"
    causes = "The head's machine went down, or its processes were killed and not restarted."
    advice = "Start the cluster again, then `geo-ray train --resume RUN`."
    more = (
        "Training continues without the head for a while. Ray ends every process of a node that "
        "has not reached the head for `RAY_gcs_rpc_server_reconnect_timeout_s` (default 60 s); "
        "after half of that time the run is saved and ended. A head with its state on disk that "
        "returns earlier causes no interruption."
    )


class InterruptedRunError(RunError):
    """The user or the job server stopped the run."""

    code = "INTERRUPTED"
    exit_code = 130
    causes = "Ctrl-C, a termination signal, `ray job stop`."
    advice = "Resume with `geo-ray train --resume RUN`."
    more = (
        "This is not a failure: the terminal shows `stopped:` and the message instead of `error` "
        "and the code."
    )


class LabError(GeoRayError):
    """The WAN lab does not start, or is used while it is down."""

    code = "LAB"
    exit_code = 9
    chapter = "WAN lab"
    causes = "The kernel refuses a namespace, a device or a setting, or the relay's process ended."
    advice = "Read the message; `geo-ray lab down` removes the remains of a crashed lab."


class LabUnavailableError(LabError):
    """This machine or user cannot run a WAN lab."""

    code = "LAB_UNAVAILABLE"
    causes = (
        "No root rights, no `/dev/net/tun`, no `ip` or `nsenter`, a system other than Linux, or a "
        "congestion control that the kernel lacks."
    )
    advice = (
        "Run as root on Linux with /dev/net/tun; without root, `emulate:` shapes the links of a "
        "run."
    )
    more = "A container needs `--privileged --device /dev/net/tun`."


class LabUnknownError(LabError):
    """The named lab is not up, or several labs are up and none is named."""

    code = "LAB_UNKNOWN"
    causes = "The lab was taken down, the id is wrong, or two labs are up at the same time."
    advice = "`geo-ray lab status` lists the active labs; name one with --lab."


class LabDownError(LabError):
    """The relay of the lab no longer answers."""

    code = "LAB_DOWN"
    causes = "Its process was ended, or the machine is overloaded."
    advice = "Remove the remains with `geo-ray lab down`, then start the lab again."


class LabLateError(LabError):
    """Packets were forwarded later than the links' round trips allow.

    docs/guides/wan-lab.md has the rule.

    The measurements describe the machine rather than the links and are rejected.
    """

    code = "LAB_LATE"
    causes = (
        "Too few cores for the relay and the processes of the lab, a host that gives the machine's "
        "cores to others (stolen time), or rates above the capacity of the relay "
        "(docs/guides/wan-lab.md). "
        "The message lists the relay's own counters and the kernel's."
    )
    advice = (
        "Leave one core for the relay, lower the rates or the number of regions, and measure "
        "again; where cycles are stolen, repeat the run."
    )


class PlanError(GeoRayError):
    """A plan cannot be made or followed."""

    code = "PLAN"
    exit_code = 10
    chapter = "Prices and plans"
    causes = "See the codes of this chapter."
    advice = "Make a plan of this configuration with `geo-ray plan`."


class PriceBookError(PlanError):
    """A price file cannot be read, or one of its records is inconsistent."""

    code = "PRICES_INVALID"
    causes = (
        "A negative or missing amount, a unit that does not fit the item, tiers that do not rise, "
        "or a manual edit."
    )
    advice = "Correct the named record; docs/guides/prices.md describes the file."


class PriceUnknownError(PlanError):
    """The plan needs a price that no price file contains.

    A missing price never counts as 0.
    """

    code = "PRICE_UNKNOWN"
    causes = (
        "A type or a pair of regions that the shipped snapshot does not contain, or a cloud whose "
        "prices you must supply."
    )
    advice = "Fetch it with `geo-ray prices refresh`, or add a record to your price file."


class CurrencyError(PlanError):
    """A price is in a currency without an exchange rate."""

    code = "CURRENCY_UNKNOWN"
    causes = (
        "Prices of several clouds without a rate in your file: rates change, so none is shipped."
    )
    advice = "Add a dated exchange rate to your price file; docs/guides/prices.md has an example."


class PlanInfeasibleError(PlanError):
    """No plan meets every constraint.

    The message names the violated constraint and the nearest plan.
    """

    code = "PLAN_INFEASIBLE"
    causes = (
        "A deadline or budget that is too tight, caps of 0, or residency rules that exclude the "
        "regions where the data are. Policies that ignore deadline and budget are refused if "
        "their plan exceeds them."
    )
    advice = "Relax the named constraint."
    more = "A number suggested by the message is rounded up, so that a plan exists with it."


class ModelTooLargeError(PlanError):
    """A model does not fit into the memory of its machines.

    It is raised before machines are rented or processes are started.
    """

    code = "MODEL_TOO_LARGE"
    causes = (
        "Accelerators or machines with too little memory for parameters, gradients, optimizer "
        "state, activations and the strategy's vectors."
    )
    advice = "Use more ranks with FSDP, fewer rows per rank, or machines with more memory."
    more = (
        "The message lists each term. Terms with `about` are estimates; `geo-ray plan` shows them "
        "for all regions."
    )


class ProfileError(PlanError):
    """A profile cannot be made, read or used."""

    code = "PROFILE_INVALID"
    causes = (
        "A file that is not a profile; runs too short to measure a step or the loss of an "
        "interval; "
        "no measurement of a machine type that the plan may rent; plain training that diverges."
    )
    advice = "Measure again with `geo-ray profile`."
    more = (
        "If a region could rent several types, name the measured one with `--machine REGION=TYPE`."
    )


class OtherModelError(PlanError):
    """A profile, measured loss or plan belongs to another model or task than the configuration.

    The message names the differences.
    """

    code = "OTHER_MODEL"
    causes = (
        "The task's options or file have changed since; for a measured loss, the data, the "
        "regions or the strategy."
    )
    advice = "Measure and plan this configuration: `geo-ray profile`, then `geo-ray plan --out`."


class ExtrapolationError(PlanError):
    """A plan needs batch sizes or numbers of workers outside the measured range."""

    code = "EXTRAPOLATION"
    causes = "A profile of a small cluster, a plan for a large one."
    advice = "Measure that range with `geo-ray profile`, or accept the estimate with --extrapolate."
    more = "`geo-ray profile` takes `--workers` and `--batch-sizes`."


class CloudError(GeoRayError):
    """A cloud refused a request, or its answer is invalid."""

    said: str = ""
    """The cloud's error code, if it sent one."""

    code = "CLOUD"
    exit_code = 11
    chapter = "Clouds"
    causes = "Wrong credentials, a region that is not enabled, or a missing permission."
    advice = "Read the cloud's message; credentials and regions are the usual causes."


class CloudUnreachableError(CloudError):
    """A cloud did not answer, or throttled all attempts."""

    code = "CLOUD_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling."
    advice = "Try again later, or check the network and the endpoint."
    more = "Known prices stay unchanged."


class ProviderRefusedError(CloudError):
    """A cloud permanently refuses an operation on machines or secrets."""

    code = "PROVIDER_REFUSED"
    causes = (
        "Wrong or expired credentials, a missing permission, or a machine image that does not "
        "exist."
    )
    advice = (
        "Give the account the permission that the message names; "
        "docs/operations/cloud-accounts.md lists all."
    )


class ProviderUnreachableError(CloudUnreachableError):
    """The result of an operation on machines or secrets is unknown."""

    code = "PROVIDER_UNREACHABLE"
    causes = "No network, a wrong endpoint, throttling, a time limit."
    advice = "Retry with the same request id, which is safe; check the cloud's list of resources."


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
    """Terraform's outputs cannot be read."""

    code = "TERRAFORM_OUTPUTS"
    causes = (
        "Nothing was applied there, the directory is wrong, the outputs were edited or belong to "
        "another release, or the program terraform is missing."
    )
    advice = (
        "Name the directory of a stack of infra/terraform after `terraform apply`, or a file of "
        "`terraform output -json`."
    )


class TuningError(GeoRayError):
    """A search could not run, or produced no result."""

    code = "TUNING"
    exit_code = 13
    chapter = "Tuning"
    causes = "See the codes of this chapter."
    advice = "Read the message; the search directory contains the results of every trial."


class SearchMissingError(TuningError):
    """The requested search algorithm is not installed."""

    code = "SEARCH_MISSING"
    causes = "`search: {kind: optuna}` or `{kind: hyperopt}` without that package."
    advice = "Install it, `pip install 'geo_ray[search]'`, or use `search: {kind: random}`."


class TrialsFailedError(TuningError):
    """All trials failed, so there is no best trial.

    The message contains the error of the first trial.
    """

    code = "TRIALS_FAILED"
    causes = (
        "Learning rates with which every run diverges, a space without a valid combination of "
        "values, or a task or data that cannot be loaded."
    )
    advice = "Train the base configuration alone first; then narrow the space."


class TuningDirectoryError(TuningError):
    """The search directory cannot be used: it exists already, or it holds another search.

    Nothing in it was changed.
    """

    code = "TUNING_DIRECTORY"
    causes = (
        "A second search of the same name; `--resume` of a search whose base, space or objectives "
        "have changed, or of a directory that is not a search."
    )
    advice = "Continue it with `--resume`, or name another directory with `--out`."


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
    """A cluster or job is inconsistent, or the job does not fit the cluster."""

    code = "SCHEDULE_INPUT"
    causes = (
        "A job that is larger than the cluster, data in a region that has no site, negative times, "
        "two jobs with the same name, or a link without goodput."
    )
    advice = "Correct the named value, or enlarge the cluster with --machines or --regions."


class TraceError(SchedulingError):
    """A job trace cannot be read."""

    code = "TRACE_INVALID"
    causes = (
        "A file whose format differs from --format, missing columns, times that are negative or "
        "not numbers, or an empty file."
    )
    advice = (
        "Correct the named line of the file, or name its format with --format (by default philly); "
        "docs/reference/scheduling-policies.md lists the columns of each."
    )


class QueueError(GeoRayError):
    """The queue cannot carry out a request."""

    code = "QUEUE"
    exit_code = 15
    chapter = "Queue"
    causes = "See the codes of this chapter."
    advice = "Read the message; `geo-ray queue list QUEUE` shows the state of the queue."


class QueueMissingError(QueueError):
    """The named queue does not exist, or no process serves it."""

    code = "QUEUE_MISSING"
    causes = "A directory or address other than the queue's `state`, or a typo."
    advice = "Start it with `geo-ray queue start CONFIG` on the cluster, or name its directory."


class QueueJournalError(QueueError):
    """The journal of a queue cannot be read."""

    code = "QUEUE_JOURNAL"
    causes = "It was written by a later release, or one of its files was edited."
    advice = "Use the release of geo_ray that wrote it, or restore the directory."


class QueueDeniedError(QueueError):
    """The requester is not authorized."""

    code = "QUEUE_DENIED"
    causes = (
        "A token of another queue or tenant, a tenant that is missing from the queue's "
        "configuration, or a request about a job of another tenant."
    )
    advice = "Use the token of the job's tenant, or ask an operator of the queue."


class QueueRequestError(QueueError):
    """The request is not valid for this queue."""

    code = "QUEUE_REQUEST"
    causes = (
        "A job that does not exist or has ended, a name that is in use, a job that is larger than "
        "the cluster, or a region that the queue does not have."
    )
    advice = "Correct the request; `geo-ray queue list QUEUE` shows the jobs."


class TenantQuotaError(QueueError):
    """A request exceeds the quota of its tenant."""

    code = "TENANT_QUOTA"
    causes = "More jobs, more workers for one job, or a higher value than the tenant's quota."
    advice = "Wait for a job to end, cancel one, or ask for less."


class SpeedUnknownError(QueueError):
    """The speed of a job is unknown, so no slot can be planned for it."""

    code = "SPEED_UNKNOWN"
    causes = "No profile of the task was found, and the speed of a worker was not given."
    advice = "Measure it with `geo-ray profile CONFIG`, or give it with --rows-per-s."


class ValueTooLowError(QueueError):
    """A job was rejected because its value is lower than the price of its resources."""

    code = "VALUE_TOO_LOW"
    causes = "The cluster is full of jobs with higher values, or the deadline cannot be met."
    advice = "Submit it again later, with a higher value, or with a later deadline."


class JobOverranError(QueueError):
    """A job took much longer than its estimate."""

    code = "JOB_OVERRAN"
    causes = "The job is slower than estimated, or other processes use its machines."
    advice = "Measure its speed with `geo-ray profile`, then continue with --resume."


class JobStalledError(QueueError):
    """A job had machines but took no step for too long."""

    code = "JOB_STALLED"
    causes = "Machines that do not start, a link that is down, or a task that hangs."
    advice = "Inspect its run with `geo-ray status RUN`, then submit it again."


class JobFailedError(QueueError):
    """A job failed repeatedly."""

    code = "JOB_FAILED"
    causes = "The error of the run, which the message names."
    advice = "Correct the cause of the run's error, then submit the job again."


class ProgramError(GeoRayError):
    """A job written as a program cannot run."""

    code = "PROGRAM"
    exit_code = 16
    chapter = "Programs"
    causes = "See the codes of this chapter."
    advice = "Correct the named item; docs/guides/programs.md describes programs and their nodes."


class ProgramInvalidError(ProgramError):
    """A program is inconsistent."""

    code = "PROGRAM_INVALID"
    causes = (
        "Two nodes with the same name, a handle of a node that does not exist, replicas below one, "
        "or handles that form a cycle."
    )
    advice = "Correct the named group or node."


class ProgramRegionError(ProgramError):
    """A program names a region that does not exist."""

    code = "PROGRAM_REGION"
    causes = (
        "A misspelt region in a group, link or placement, or a cluster without nodes of that label."
    )
    advice = "Correct the region, or label nodes of the cluster with it."


class ProgramLoadError(ProgramError):
    """No program can be loaded from a file."""

    code = "PROGRAM_LOAD"
    causes = "A misspelt name, a file without a program, or one with several."
    advice = "Name the program: FILE.py:name, a `Program` or a function that returns one."


class ProgramStalledError(ProgramError):
    """The program has not ended, and no further event is pending on the virtual clock."""

    code = "PROGRAM_STALLED"
    causes = "A node that waits for a call or value that never comes."
    advice = "Check what the named nodes wait for."


class NodeFailedError(ProgramError):
    """A node raised an exception, or its process ended, more often than its group allows."""

    code = "NODE_FAILED"
    causes = "An exception in the node's own code; its process was killed or ran out of memory."
    advice = "Read the node's traceback in the message; allow restarts with `restarts`."


class NodeCallError(ProgramError):
    """A method of a node raised an exception during a call; the node continues."""

    code = "NODE_CALL"
    causes = "An exception in the method, a missing method, or wrong arguments."
    advice = "Read the node's traceback in the message."


class NodeLostError(ProgramError):
    """A node's process ended during a call, so the result of the call is unknown."""

    code = "NODE_LOST"
    causes = "The process was killed or ran out of memory, or its machine is gone."
    advice = "Repeat the call if it may run twice: the restarted node answers."


class NodeEndedError(ProgramError):
    """A call to a node of a program that has ended."""

    code = "NODE_ENDED"
    causes = "A caller that was used after its program had ended."
    advice = "Call nodes while the program runs, and return results needed later from `run`."


class NodeUnshippableError(ProgramError):
    """A node's function or its arguments cannot be sent to another process."""

    code = "NODE_UNSHIPPABLE"
    causes = (
        "A lambda, a class defined inside a function, or an argument that holds a lock or a socket."
    )
    advice = "Define the node at module level and pass it plain values, or use threads."


class ValueUnshippableError(ProgramError):
    """A value cannot be sent between nodes."""

    code = "VALUE_UNSHIPPABLE"
    causes = "An object of a custom class, a set, an open file, or an array of objects."
    advice = (
        "Send None, numbers, strings, bytes, lists, tuples, dictionaries, NumPy arrays and tensors."
    )


class JoinError(GeoRayError):
    """A training loop of the user cannot take part in a run."""

    code = "JOIN"
    exit_code = 17
    chapter = "Own training loop"
    causes = "See the codes of this chapter."
    advice = "Correct the named item; docs/guides/your-own-loop.md describes how a region joins."


class ModelMismatchError(JoinError):
    """The model of a region or rank differs from that of the run."""

    code = "MODEL_MISMATCH"
    causes = (
        "Another model configuration, vocabulary or dtype in one region; other frozen layers; "
        "ranks that hold different parameters, as in pipeline parallelism."
    )
    advice = "Build the same model, with the same trained parameters and dtypes, in every region."


class RanksDisagreeError(JoinError):
    """The ranks of a region have not made the same steps."""

    code = "RANKS_DISAGREE"
    causes = (
        "A rank that skips `sync.step` for some batches, data loaders of unequal length, or ranks "
        "that end their loops at different steps."
    )
    advice = "Call `sync.step` on every rank after every optimizer step."


class LoopMisuseError(JoinError):
    """The training loop calls geo_ray in a way that cannot be right."""

    code = "LOOP_MISUSE"
    causes = (
        "`sync.step` after `sync.done`, or never; the loop ends before `sync.done` is true; "
        "`sync.report` when no evaluation is due, or with values that are no sums; several "
        "trainings with one site at the same time."
    )
    advice = "Loop over `sync.batches(loader)`, and call `sync.step` once per optimizer step."


class LoopFailedError(JoinError):
    """The loop of a region that is a group (`group.loop`) cannot be loaded, or raised an error."""

    code = "LOOP_FAILED"
    causes = "A missing file or function, a failed import, or an exception in the loop."
    advice = "Correct the named line; docs/guides/groups.md has an example of a loop."


class JoinRefusedError(JoinError):
    """The run does not accept this region."""

    code = "JOIN_REFUSED"
    causes = (
        "A region that the run does not have, a second process group with the same region's name, "
        "an older process group that was replaced, or a run that has ended."
    )
    advice = "Compare the region's name with the `regions` of the served configuration."


class EndpointListError(JoinError):
    """A list of the addresses at which a run is served cannot be used."""

    code = "ENDPOINTS_REFUSED"
    causes = (
        "A list that is not signed by the run's authority, is of another run, or is older than "
        "one that is known: a server that was replaced, or a damaged file next to the credentials."
    )
    advice = "Remove the file `REGION.endpoints.json` next to the region's credentials."


class ServerLostError(JoinError):
    """The process that serves the run cannot be reached."""

    code = "SERVER_LOST"
    causes = "A wrong address, a closed port, another run's credentials, or a server that ended."
    advice = (
        "Check that `geo-ray serve` runs, and that its address can be reached from this machine."
    )
