"""`up`, `cluster_status` and `down`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.display import Table
from geo_ray.api.plan import FollowedPlan, PlanInputs, plan_to_follow
from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, InterruptedRunError
from geo_ray.base.load import load_tree, override_items
from geo_ray.base.notebooks import html_view
from geo_ray.base.yaml import write_yaml
from geo_ray.cloud.cluster.down import EndedCluster as EndedCluster
from geo_ray.cloud.cluster.down import end_cluster
from geo_ray.cloud.cluster.offer import ClusterOffer as ClusterOffer
from geo_ray.cloud.cluster.offer import cluster_offer
from geo_ray.cloud.cluster.providers import LOCAL, open_clouds, secret_command, token_path
from geo_ray.cloud.cluster.spec import ClusterSpec, cluster_spec, state_asked
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState
from geo_ray.cloud.cluster.status import ClusterReport as ClusterReport
from geo_ray.cloud.cluster.status import report_of
from geo_ray.cloud.cluster.up import await_machines, make_cluster
from geo_ray.cloud.terraform import TerraformStack, read_stack
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.provider import ProviderConfig
from geo_ray.planner.config import MachineConfig, RegionOffer
from geo_ray.planner.plan import Plan
from geo_ray.prices.price_book import Instance, known_book, own_files
from geo_ray.runs.follow_plan import check_model
from geo_ray.runs.plan_inputs import check_group_memory, model_size
from geo_ray.runs.planning import Policy, make_plan
from geo_ray.storage.uri import is_s3

Notify = Callable[[str], None]
TERRAFORM: Final = "terraform"


@dataclass(frozen=True, slots=True, repr=False)
class UpCluster:
    """A cluster.

    Attributes:
        record: specification of the cluster.
        state: location of its state.
        report: its current state.
    """

    record: ClusterRecord
    state: ClusterState
    report: ClusterReport

    def __repr__(self) -> str:
        report = self.report
        return (
            f"<Cluster {report.name}: {report.phase}, {len(report.machines)} machines, "
            f"{report.usd_per_hour:.4g} USD/h>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (row.id, row.role, row.region or "", row.type, row.state)
            for row in self.report.machines
        ]
        return html_view(repr(self)[1:-1], ("machine", "role", "region", "type", "state"), rows)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for processes of this computer; only for a local cluster."""
        if self.record.clouds != (LOCAL,):
            return {}
        return {
            "RAY_ADDRESS": self.report.address or "",
            "RAY_API_SERVER_ADDRESS": self.report.job_server or "",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_path(self.record, self.state)),
        }

    @property
    def token_command(self) -> str | None:
        """Command that prints the token of a cluster in a cloud."""
        return None if self.record.clouds == (LOCAL,) else secret_command(self.record)


def up(
    config: Config,
    overrides: Overrides = (),
    *,
    provider: str | None = None,
    plan: FollowedPlan | None = None,
    policy: Policy = "optimal",
    inputs: PlanInputs | None = None,
    from_terraform: FilePath | None = None,
    longest_s: float = 900.0,
    notify: Notify = lambda _: None,
    base_dir: FilePath | None = None,
) -> UpCluster:
    """Create the cluster of a configuration, or complete an unfinished one.

    Args:
        config: a file, a mapping, or a result of `load_config`; with a section `plan`.
        overrides: changed values by dotted key.
        provider: provider of all machines: local, aws or tencent; default: as in plan.regions;
            terraform: the stack of `from_terraform`.
        plan: the plan to use; default: a new plan.
        policy: planning policy, without ``plan``.
        inputs: inputs of the plan.
        from_terraform: a stack of infra/terraform, whose head, networks, secrets and permissions
            are used: the directory of `terraform apply`, or a file with the output of `terraform
            output -json`. The autoscaler owns the numbers of machines.
        longest_s: maximum seconds to wait for the plan's machines; later machines still join.
        notify: called with each step.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: the configuration does not describe a valid cluster.
        TerraformOutputsError: there is no stack, or it belongs to another release.
        ClusterStateError: the cluster is being deleted, or has another configuration.
        GeoRayError: the cluster cannot be created for another reason.
    """
    stack = _stack(provider, from_terraform)
    asked = _asked(config, overrides, provider, plan, policy, inputs, base_dir, notify, stack=stack)
    try:
        record = make_cluster(asked, notify)
        report = await_machines(record, asked.state, longest_s, notify)
    except KeyboardInterrupt:
        raise _half_made(asked.state) from None
    return UpCluster(record, asked.state, report)


def up_offer(
    config: Config,
    overrides: Overrides = (),
    *,
    provider: str | None = None,
    plan: FollowedPlan | None = None,
    policy: Policy = "optimal",
    inputs: PlanInputs | None = None,
    from_terraform: FilePath | None = None,
    base_dir: FilePath | None = None,
) -> ClusterOffer:
    """Return the machines that `up` would rent, their prices and alternatives; start nothing.

    Args:
        config: as for `up`.
        overrides: changed values by dotted key.
        provider: provider of all machines.
        plan: the plan to use.
        policy: planning policy, without ``plan``.
        inputs: inputs of the plan.
        from_terraform: the stack of the cluster.
        base_dir: as for `geo_ray.train`.
    """
    stack = _stack(provider, from_terraform)
    asked = _asked(
        *(config, overrides, provider, plan, policy, inputs, base_dir, lambda _: None),
        stack=stack,
        dry=True,
    )
    return cluster_offer(asked)


def cluster_status(cluster: FilePath) -> ClusterReport:
    """Return the state of a cluster: machines, cost, planned and actual machines, decisions.

    Args:
        cluster: its directory below ``provider.state``, or its configuration.

    Raises:
        ClusterStateError: the cluster does not exist.
        CloudError: the cloud does not answer.
    """
    state = cluster_at(cluster)
    record = state.known()
    clouds = open_clouds(record, state, longest_s=record.autoscale.answer_s)
    return report_of(record, state, clouds)


def down(
    cluster: FilePath, *, at_once: bool = False, notify: Notify = lambda _: None
) -> EndedCluster:
    """Delete a cluster: save its runs, terminate its machines, and check that nothing is left.

    Args:
        cluster: as for `cluster_status`.
        at_once: do not wait for runs to be saved and machines to drain.
        notify: called with each step.

    Raises:
        ClusterStateError: the cluster does not exist.
        MachinesLeftError: a part of the cluster still exists.
        CloudError: the cloud refuses.
    """
    state = cluster_at(cluster)
    try:
        return end_cluster(state, notify, at_once=at_once)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"{state.name} is not deleted: its remains cost money",
            fix=f"Repeat `geo-ray down {state.shown}`.",
        ) from None


def _half_made(state: ClusterState) -> InterruptedRunError:
    found, _ = state.read()
    if found is None or found.phase == "down":
        return InterruptedRunError(
            f"no part of {state.name} was created", fix="Repeat `geo-ray up`."
        )
    return InterruptedRunError(
        f"{state.name} is incomplete and continues without this command: its machines are rented "
        "and "
        "cost money",
        fix=f"Complete it with the same command, or delete it: `geo-ray down {state.shown}`.",
    )


def cluster_at(cluster: FilePath) -> ClusterState:
    """Return the state of a cluster, given its directory or its configuration."""
    name = os.fspath(cluster)
    if not is_s3(name) and name.endswith((".yaml", ".yml")):
        experiment = load_tree(Path(name), (), Experiment, read_only=True)
        section = experiment.provider or ProviderConfig()
        return ClusterState.below(section.state, experiment.name)
    return ClusterState.at(name)


def _asked(
    config: Config,
    overrides: Overrides,
    provider: str | None,
    plan: FollowedPlan | None,
    policy: Policy,
    inputs: PlanInputs | None,
    base_dir: FilePath | None,
    notify: Notify,
    *,
    stack: TerraformStack | None = None,
    dry: bool = False,
) -> ClusterSpec:
    with preserving_threads():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        if not dry and experiment.cluster.kind == "local":
            raise ConfigError(
                "cluster.kind is local: a run of this configuration would start a local cluster "
                "instead of using this one",
                fix="Add `cluster: {kind: existing}`.",
            )
        cloud = None if stack is not None else provider
        state = state_asked(experiment, cloud, stack)
        if not dry:
            state.read()  # fail early if it cannot be read
        sources = (inputs or PlanInputs()).sources()
        if plan is None:
            notify("planning")
            found = make_plan(experiment, source.parent, policy, sources).plan
        else:
            found = plan_to_follow(plan)
            check_model(found, experiment, source.parent)
            if experiment.groups and experiment.task_regions:
                size = model_size(load_task(experiment.task, source.parent), experiment.seed)
                chosen = {
                    each.region: [one.type for one in each.machines] for each in found.regions
                }
                check_group_memory(experiment, size, Instance(), chosen)
        _notify_plan(found, notify)
        book = known_book(sources.prices or own_files())
    return cluster_spec(experiment, found, book, cloud, time.time(), stack)


def _stack(provider: str | None, from_terraform: FilePath | None) -> TerraformStack | None:
    if (provider == TERRAFORM) != (from_terraform is not None) and provider is not None:
        raise ConfigError(
            f"the provider is {provider}, and "
            + ("no stack is named" if from_terraform is None else "a stack of Terraform is named"),
            fix="Give both, `--provider terraform --from-terraform DIR`, or neither.",
        )
    return None if from_terraform is None else read_stack(Path(from_terraform))


def _notify_plan(plan: Plan, notify: Notify) -> None:
    notify(f"planned: {plan.machines_text}")


def offers_of(stack: TerraformStack) -> dict[str, RegionOffer]:
    """Return the section `plan.regions`, without speeds, rows and prices."""
    return {
        name: RegionOffer(
            cloud=place.cloud,
            at=place.at,
            machines=tuple(
                MachineConfig(type=one.type, cap=one.cap, markets=one.markets)
                for one in place.machines
            ),
            rows=None,
            server=place.server,
            disk=None,
            disk_gb=0.0,
        )
        for name, place in stack.places.items()
    }


def inventory_tree(stack: TerraformStack) -> dict[str, JSONValue]:
    """Return the sections `cluster`, `run` and `plan` from the stack, without defaults."""
    regions: dict[str, JSONValue] = {
        name: offer.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for name, offer in offers_of(stack).items()
    }
    return {
        "cluster": {"kind": "existing", "address": stack.head.address},
        "run": {"dir": stack.runs},
        "plan": {"regions": regions},
    }


@dataclass(frozen=True, repr=False)
class Inventory:
    """Contents of a Terraform stack.

    Attributes:
        stack: all outputs of the stack.
    """

    stack: TerraformStack

    def table(self) -> Table:
        """Return a row per region and machine type."""
        rows = [
            {
                "region": name,
                "cloud": place.cloud,
                "at": place.at,
                "type": one.type,
                "cap": one.cap,
                "markets": ", ".join(one.markets),
            }
            for name, place in self.stack.places.items()
            for one in place.machines
        ]
        return Table(rows)

    def __repr__(self) -> str:
        return f"<Inventory: {', '.join(self.stack.places)}; {len(self.table())} machine types>"

    def _repr_html_(self) -> str:
        found = self.table()
        rows = [[str(value) for value in row.values()] for row in found]
        return html_view(repr(self)[1:-1], found.column_names, rows)

    def config(self) -> dict[str, JSONValue]:
        """Return the configuration sections `cluster`, `run` and `plan`."""
        return inventory_tree(self.stack)

    def yaml(self) -> str:
        """Return these sections as text."""
        return write_yaml(self.config())


def inventory(from_terraform: FilePath) -> Inventory:
    """Read the outputs of a stack of infra/terraform.

    Args:
        from_terraform: the directory of `terraform apply`, or a file with the output of `terraform
            output -json`.

    Raises:
        TerraformOutputsError: the stack does not exist, was not applied, or belongs to another
            release.
    """
    return Inventory(read_stack(Path(from_terraform)))
