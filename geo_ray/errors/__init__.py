"""One error tree. Every error has a stable code, a process exit code and says how to mend it.

`docs/errors.md` has a section per code; a test keeps the two in step.
"""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError as GeoRayError
from geo_ray.errors.base import from_code as from_code
from geo_ray.errors.planning import CloudError as CloudError
from geo_ray.errors.planning import CloudUnreachableError as CloudUnreachableError
from geo_ray.errors.planning import CurrencyError as CurrencyError
from geo_ray.errors.planning import ExtrapolationError as ExtrapolationError
from geo_ray.errors.planning import OtherModelError as OtherModelError
from geo_ray.errors.planning import PlanError as PlanError
from geo_ray.errors.planning import PlanInfeasibleError as PlanInfeasibleError
from geo_ray.errors.planning import PriceBookError as PriceBookError
from geo_ray.errors.planning import PriceUnknownError as PriceUnknownError
from geo_ray.errors.planning import ProfileError as ProfileError

# ------------------------------------------------------------------ configuration (exit code 2)


class ConfigError(GeoRayError):
    """A configuration that cannot be used."""

    code = "CONFIG_INVALID"
    exit_code = 2
    advice = "Correct the named key; `geo-ray config schema` lists every key."


# ------------------------------------------------------------------ data (3)


class DataError(GeoRayError):
    """Root of everything that is wrong with data."""

    code = "DATA"
    exit_code = 3


class ShardCorruptError(DataError):
    """A shard's bytes are not those of the manifest."""

    code = "DATA_CORRUPT"
    advice = "Restore the shard from its source, or write the data anew with `geo-ray data shard`."


class ShardMissingError(DataError):
    """A shard of the manifest is not in its store."""

    code = "DATA_MISSING"
    advice = "Check the store's address and credentials, then that the shard was uploaded."


class SchemaMismatchError(DataError):
    """A shard's columns or types are not those of the manifest or the task."""

    code = "DATA_SCHEMA"
    advice = "Write the shard with the task's columns and types."


class ShardEmptyError(DataError):
    """A shard, or a region's share of the data, has no rows."""

    code = "DATA_EMPTY"
    advice = "Remove the shard from the manifest, or give the region data."


class ResidencyDeniedError(DataError):
    """Somebody asked for a shard of another region; refused before any I/O."""

    code = "RESIDENCY_DENIED"
    advice = "Read a shard only in its home region; check the manifest's `region` of the shard."


class StoreError(DataError):
    """An object store does not answer, refuses, or has no room."""

    code = "STORE"
    advice = "Check the endpoint, the credentials and the bucket's name."


class ManifestError(DataError):
    """A manifest that cannot be read or contradicts itself."""

    code = "MANIFEST_INVALID"
    advice = "Write the manifest anew with `geo-ray data shard`."


# ------------------------------------------------------------------ task (4)


class TaskError(GeoRayError):
    """Root of everything that is wrong with the user's task."""

    code = "TASK"
    exit_code = 4


class TaskLoadError(TaskError):
    """The task does not import or lacks what the protocol asks."""

    code = "TASK_LOAD"
    advice = "Import the file in a Python shell; see docs/tasks.md for what a task must define."


class TaskOutputError(TaskError):
    """Loss or evaluation has the wrong shape or type."""

    code = "TASK_OUTPUT"
    advice = "Return the mean loss as a scalar tensor that depends on the parameters."


class NonFiniteError(TaskError):
    """Loss, gradient or update is NaN or infinite; refused, parameters unchanged."""

    code = "NON_FINITE"
    advice = "Lower the learning rate, clip gradients or look for bad samples, then resume."


# ------------------------------------------------------------------ cluster (5)


class ClusterError(GeoRayError):
    """Root of everything that is wrong with the Ray cluster."""

    code = "CLUSTER"
    exit_code = 5


class ClusterStartError(ClusterError):
    """The local cluster does not come up."""

    code = "CLUSTER_START"
    advice = "Read the named log; free memory or ports if they ran out."


class RayUnreachableError(ClusterError):
    """No Ray cluster answers at the address."""

    code = "RAY_UNREACHABLE"
    advice = "Start the cluster, or correct `cluster.address`, or use `cluster.kind: local`."


class PreflightError(ClusterError):
    """The cluster is not fit for the job; found before anything was started."""

    code = "PREFLIGHT"
    advice = "Mend each listed point and start again."


class PlacementError(ClusterError):
    """A region's demand cannot be placed within the deadline."""

    code = "PLACEMENT_INFEASIBLE"
    advice = "Add nodes with the region's label, or ask for fewer workers or CPUs there."


class PortInUseError(ClusterError):
    """A port that was asked for is taken."""

    code = "PORT_IN_USE"
    advice = "Choose another port, or 0 for any free one."


# ------------------------------------------------------------------ wide-area network (6)


class TransportError(GeoRayError):
    """Root of everything that is wrong between regions."""

    code = "TRANSPORT"
    exit_code = 6


class FrameError(TransportError):
    """Received bytes are no valid frame: magic, length, digest or header are wrong."""

    code = "FRAME_INVALID"
    advice = "Check that both ends run the same release and nothing else talks to this port."


class PeerRefusedError(TransportError):
    """The peer belongs to another run, speaks another protocol or has no valid key."""

    code = "PEER_REFUSED"
    advice = "Check that every region was started by the same run and release."


class CertificateError(TransportError):
    """A certificate or its key cannot be read, written or used."""

    code = "CERTIFICATE_INVALID"
    advice = "Make it with `geo-ray certs issue`; `geo-ray certs show` lists what a deployment has."


class LinkDownError(TransportError):
    """A peer could not be reached before the deadline."""

    code = "LINK_DOWN"
    advice = (
        "Check routes and firewalls between the two regions; the run resumes from its checkpoint."
    )


class LinkUnknownError(TransportError):
    """A link between two regions was not measured."""

    code = "LINK_UNKNOWN"
    advice = "Measure it with `geo-ray probe`, or name a link table that has the pair."


class ReferenceLostError(TransportError):
    """An update is a difference from something that the averager does not remember."""

    code = "REFERENCE_LOST"
    advice = "None needed: the sender hears of it and sends the same update in full."


class DeadlineExceededError(TransportError):
    """A wait reached its deadline."""

    code = "DEADLINE_EXCEEDED"
    advice = (
        "Raise the named deadline if the work is really that slow; otherwise look for what hangs."
    )


# ------------------------------------------------------------------ checkpoint (7)


class CheckpointError(GeoRayError):
    """Root of everything that is wrong with checkpoints."""

    code = "CHECKPOINT"
    exit_code = 7


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is not what its manifest says."""

    code = "CHECKPOINT_CORRUPT"
    advice = "Resume from the checkpoint before it: `--resume` takes the newest that is whole."


class CheckpointMissingError(CheckpointError):
    """There is no checkpoint to resume from."""

    code = "CHECKPOINT_MISSING"
    advice = "Start without --resume, or name the right run directory."


class ConfigDriftError(CheckpointError):
    """The configuration differs from the one that the checkpoint was made with."""

    code = "CONFIG_DRIFT"
    advice = "Use the run's config.lock.yaml, or pass --allow-drift if the difference is meant."


# ------------------------------------------------------------------ run (8)


class RunError(GeoRayError):
    """Root of everything that ends a run early."""

    code = "RUN"
    exit_code = 8


class RunDirectoryError(RunError):
    """The run directory cannot be written, or the disk is full."""

    code = "RUN_DIRECTORY"
    advice = "Free space or choose another `run.dir`."


class RegionLostError(RunError):
    """A region's parameter server or bridge died."""

    code = "REGION_LOST"
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."


class WorkerLostError(RunError):
    """A worker died more often than `train.max_worker_restarts` allows."""

    code = "WORKER_LOST"
    advice = "Read the worker's log for the cause; out of memory is the usual one."


class InterruptedRunError(RunError):
    """The user or the job server stopped the run."""

    code = "INTERRUPTED"
    exit_code = 130
    advice = "Resume with `geo-ray train --resume RUN`."


# ------------------------------------------------------------------ WAN lab (9)


class LabError(GeoRayError):
    """Root of everything that is wrong with the WAN lab; a lab that does not come up."""

    code = "LAB"
    exit_code = 9
    advice = "Read the message; `geo-ray lab down` removes what a crashed lab has left."


class LabUnavailableError(LabError):
    """This machine, or this user, cannot have a lab."""

    code = "LAB_UNAVAILABLE"
    advice = "Run as root on Linux with /dev/net/tun; without, `emulate:` shapes a run's own links."


class LabUnknownError(LabError):
    """No such lab is up, or several are and none is named."""

    code = "LAB_UNKNOWN"
    advice = "`geo-ray lab status` lists the labs that are up; name one with --lab."


class LabDownError(LabError):
    """The lab's relay does not answer any more."""

    code = "LAB_DOWN"
    advice = "Remove what is left with `geo-ray lab down`, then bring the lab up again."


class LabLateError(LabError):
    """The relay could not keep time, so figures taken meanwhile are worthless."""

    code = "LAB_LATE"
    advice = "Leave the relay a core, lower the rates or the number of regions, and measure again."


class InvariantError(GeoRayError):
    """The software contradicts itself; a bug of geo_ray."""

    code = "INVARIANT"
    exit_code = 70
    advice = "Report it with the run directory; the message names the invariant."
