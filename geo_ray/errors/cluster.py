"""Errors of the Ray cluster (exit code 5)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


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
