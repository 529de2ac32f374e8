"""Serving a queue: `geo_ray.start_queue`, `stop_queue`, `load_queue`, `new_queue_token`."""

from __future__ import annotations

import os
from pathlib import Path

from geo_ray.api.config import FilePath, Overrides
from geo_ray.base.load import load_tree, override_items, text_of
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.scheduler.queue.config import QueueConfig as QueueConfig
from geo_ray.scheduler.queue.inbox import key_of, new_token
from geo_ray.scheduler.queue.state import QueuePlace
from geo_ray.storage.uri import is_s3

_ADVICE = "docs/queue.md describes the file of a queue."


def load_queue(config: FilePath | QueueConfig, overrides: Overrides = ()) -> QueueConfig:
    """Read and check the configuration of a queue.

    Raises:
        ConfigError: naming every key that is wrong.
    """
    if isinstance(config, QueueConfig):
        source = text_of(config, Path.cwd())
        return load_tree(source, override_items(overrides), QueueConfig, _ADVICE)
    return load_tree(Path(config), override_items(overrides), QueueConfig, _ADVICE)


def start_queue(
    config: FilePath | QueueConfig,
    overrides: Overrides = (),
    *,
    address: str = "auto",
    longest_s: float = 60.0,
) -> str:
    """Serve a queue from an actor of a cluster; return its folder.

    The actor goes on when this process ends, and is started anew when it dies. May be repeated:
    with another configuration, the queue goes on with that.

    Args:
        config: of the queue.
        overrides: changes of single keys.
        address: of the cluster's head.
        longest_s: longest wait until it is served.

    Raises:
        ConfigError: the configuration is wrong.
        ClusterError: there is no cluster, or it has no job server.
        QueueError: it is not served in time.
    """
    from geo_ray.scheduler.queue.actor import serve_queue  # Ray takes seconds to import

    queue = _absolute(load_queue(config, overrides))
    place = QueuePlace.of(queue)
    place.make()
    serve_queue(queue, ExistingClusterConfig(address=address), longest_s)
    return place.uri


def stop_queue(
    config: FilePath | QueueConfig, overrides: Overrides = (), *, address: str = "auto"
) -> bool:
    """Serve a queue no more; its jobs go on, and so does the queue once it is started again.

    Args:
        config: of the queue.
        overrides: changes of single keys.
        address: of the cluster's head.

    Returns:
        Whether anybody served it.
    """
    from geo_ray.scheduler.queue.actor import unserve_queue

    queue = load_queue(config, overrides)
    return unserve_queue(queue.name, ExistingClusterConfig(address=address))


def new_queue_token() -> tuple[str, str]:
    """Make a token for a tenant: the token, and the key for the queue's configuration."""
    token = new_token()
    return token, key_of(token)


def place_of(queue: FilePath) -> QueuePlace:
    """The place of a queue by its folder or its configuration."""
    name = os.fspath(queue)
    if not is_s3(name) and name.endswith((".yaml", ".yml")):
        return QueuePlace.of(load_queue(name))
    return QueuePlace.at(name)


def names_queue(place: FilePath) -> bool:
    """Whether a place is a queue's folder or configuration, and so no run."""
    name = os.fspath(place)
    if is_s3(name):
        return QueuePlace.at(name).is_there()
    return name.endswith((".yaml", ".yml")) or (
        Path(name).is_dir() and QueuePlace.at(name).is_there()
    )


def _absolute(queue: QueueConfig) -> QueueConfig:
    """Name directories in full: the actor works elsewhere."""
    changes = {
        key: str(Path(value).absolute())
        for key, value in (("state", queue.state), ("runs", queue.runs))
        if not is_s3(value)
    }
    return queue.model_copy(update=changes)
