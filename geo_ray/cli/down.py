"""`geo-ray down`: ends a cluster, and asks the cloud whether anything is left."""

from __future__ import annotations

from functools import partial

import click

from geo_ray.cli.paths import RunRef, RunReference, loading
from geo_ray.cli.say import say


@click.command(short_help="End CLUSTER, and all that it has rented.")
@click.argument("cluster", metavar="CLUSTER", type=RunReference())
@click.option(
    "--now", "at_once", is_flag=True, help="Do not wait for runs to save and machines to drain."
)
def down(cluster: RunRef, at_once: bool) -> None:
    """End CLUSTER: its runs are saved, its machines ended, and the cloud is asked what is left.

    CLUSTER is the folder that `geo-ray up` has printed, or the CONFIG that it was made of. May be
    repeated; fails if anything of the cluster is left.
    """
    loading("torch", "ray", "geo_ray.api.clusters")
    click.echo(f"asking for {cluster}", err=True)
    import geo_ray

    found = geo_ray.down(cluster, at_once=at_once, notify=partial(say, err=True))
    if found.was_down:
        say(
            f"{found.name} was down already: the cloud lists nothing of it; "
            f"{found.spent_usd:.4g} USD in all"
        )
        return
    what = "1 machine" if found.machines == 1 else f"{found.machines} machines"
    say(
        f"{found.name} is down: {what} ended, {found.spent_usd:.4g} USD in all; "
        "the cloud lists nothing of it any more"
    )
    if found.unread is not None:
        say(
            f"the autoscaler's journal could not be read and is kept as {found.unread}: what its "
            "machines cost is not in that sum"
        )
    if found.stack is not None:
        say(
            f"the head, networks, secrets and buckets are Terraform's, of the stack {found.stack}: "
            "`terraform destroy` in its directory ends them"
        )
