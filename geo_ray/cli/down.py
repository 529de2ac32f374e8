"""`geo-ray down`: deletes a cluster, and checks that the cloud lists nothing of it."""

from __future__ import annotations

from functools import partial

import click

from geo_ray.cli.paths import RunRef, RunReference, loading
from geo_ray.cli.say import say


@click.command(short_help="Delete CLUSTER and all its machines.")
@click.argument("cluster", metavar="CLUSTER", type=RunReference())
@click.option(
    "--now", "at_once", is_flag=True, help="Do not wait for runs to be saved and machines to drain."
)
def down(cluster: RunRef, at_once: bool) -> None:
    """Delete CLUSTER: save its runs, terminate its machines, and check that nothing is left.

    CLUSTER is the directory that `geo-ray up` printed, or the CONFIG of the cluster. The command
    can be repeated; it fails if anything of the cluster is left.
    """
    loading("torch", "ray", "geo_ray.api.clusters")
    click.echo(f"looking up {cluster}", err=True)
    import geo_ray

    found = geo_ray.down(cluster, at_once=at_once, notify=partial(say, err=True))
    if found.was_down:
        say(
            f"{found.name} was already deleted: the cloud lists nothing of it; "
            f"{found.spent_usd:.4g} USD in all"
        )
        return
    what = "1 machine" if found.machines == 1 else f"{found.machines} machines"
    say(
        f"{found.name} is deleted: {what} terminated, {found.spent_usd:.4g} USD in total; "
        "the cloud lists nothing of it"
    )
    if found.unread is not None:
        say(
            f"the autoscaler's journal is unreadable and was moved to {found.unread}: the cost of "
            "its machines is not included"
        )
    if found.stack is not None:
        say(
            "the head, networks, secrets and buckets belong to the Terraform stack "
            f"{found.stack}: `terraform destroy` in its directory deletes them"
        )
