"""Jobs of a queue: `submit_job`, `cancel_job`, `move_job`, `queue_report`."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.base.errors import QueueDeniedError, QueueMissingError, QueueRequestError, from_code
from geo_ray.base.load import load_tree, override_items, text_of
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.config import QueueConfig as QueueConfig
from geo_ray.scheduler.queue.inbox import key_of, new_token
from geo_ray.scheduler.queue.job_spec import (
    AnyRequest,
    CancelRequest,
    JobRequest,
    MoveRequest,
    SubmitRequest,
    is_job_name,
)
from geo_ray.scheduler.queue.job_spec import JobHints as JobHints
from geo_ray.scheduler.queue.job_spec import JobValue as JobValue
from geo_ray.scheduler.queue.job_spec import ValueChange as ValueChange
from geo_ray.scheduler.queue.journal import QueueJournal
from geo_ray.scheduler.queue.page import queue_sections
from geo_ray.scheduler.queue.page_reader import QueueLiveReader
from geo_ray.scheduler.queue.report import QueueReport as QueueReport
from geo_ray.scheduler.queue.state import QueueLocation, QueueState, RequestAnswer
from geo_ray.storage.uri import is_s3
from geo_ray.telemetry.html_page import html_page, write_html

_LOOK_S = 0.2
Position = Literal["first", "last", "before"]


@dataclass(frozen=True, slots=True)
class QueueUser:
    """Who asks.

    Attributes:
        tenant: as the queue's configuration names it.
        token: of the tenant; not part of the repr.
    """

    tenant: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueAnswer:
    """What became of a request.

    Attributes:
        id: of the request.
        is_taken: whether the queue has heard it; else it lies in the tenant's box.
    """

    id: str
    is_taken: bool


def submit_job(
    queue: FilePath,
    config: Config,
    overrides: Overrides = (),
    *,
    user: QueueUser,
    name: str | None = None,
    value: JobValue | None = None,
    hints: JobHints | None = None,
    working_dir: FilePath | None = None,
    wait_s: float = 10.0,
) -> QueueAnswer:
    """Submit a job to a queue.

    Args:
        queue: its folder, or its configuration.
        config: what is to train: a file, a mapping, or what `load_config` gave.
        overrides: changes of single keys.
        user: who asks.
        name: of the job; default: the configuration's, in small letters.
        value: what it is worth by when it is done.
        hints: what the configuration does not say.
        working_dir: of the job's own code, which the queue's machine sees.
        wait_s: longest wait for the queue to hear of it.

    Raises:
        ConfigError: the configuration is wrong.
        SpeedUnknownError: nobody knows how fast the job is.
        QueueDeniedError, QueueRequestError, TenantQuotaError: the queue refuses it.
        QueueMissingError: there is no queue.
    """
    # PyTorch takes seconds to import, and the other requests do without it.
    from geo_ray.api.auto import load_experiment
    from geo_ray.scheduler.queue.job_config import config_tree, spec_of

    with preserving_threads():
        source = source_of(config)
        experiment, _ = load_experiment(source, override_items(overrides))
        spec = spec_of(experiment, source.parent.absolute(), hints or JobHints())
    called = name or experiment.name.lower().replace(".", "-")
    if not is_job_name(called):
        raise QueueRequestError(
            f"a job cannot be called {called!r}",
            fix="Give a --name of at most 40 of a-z, 0-9, - and _, none of the last two at an end.",
        )
    job = JobRequest.model_validate(
        {
            "name": called,
            "config": config_tree(experiment),
            "spec": spec,
            "value": value or JobValue(),
            "working_dir": None if working_dir is None else str(Path(working_dir).absolute()),
        }
    )
    request = SubmitRequest(id=_id(), sent_unix_s=time.time(), job=job)
    return _asked(queue, user, request, wait_s)


def cancel_job(queue: FilePath, job: str, *, user: QueueUser, wait_s: float = 10.0) -> QueueAnswer:
    """Cancel a job; one that runs is saved first.

    Args:
        queue: its folder, or its configuration.
        job: its name.
        user: who asks.
        wait_s: longest wait for the queue to hear of it.

    Raises:
        QueueDeniedError, QueueRequestError: the queue refuses that.
        QueueMissingError: there is no queue.
    """
    request = CancelRequest(id=_id(), sent_unix_s=time.time(), job=job)
    return _asked(queue, user, request, wait_s)


def move_job(
    queue: FilePath,
    job: str,
    *,
    user: QueueUser,
    position: Position | None = None,
    before: str | None = None,
    value: ValueChange | None = None,
    wait_s: float = 10.0,
) -> QueueAnswer:
    """Change a job's place in a queue, or what it is worth.

    Args:
        queue: its folder, or its configuration.
        job: its name.
        user: who asks.
        position: first or last of all.
        before: the job that it is to be before.
        value: what becomes another; all else of its worth stays as it was.
        wait_s: longest wait for the queue to hear of it.

    Raises:
        QueueDeniedError, QueueRequestError, TenantQuotaError: the queue refuses that.
        QueueMissingError: there is no queue.
    """
    request = MoveRequest(
        id=_id(),
        sent_unix_s=time.time(),
        job=job,
        before=before,
        position="before" if before is not None else position,
        value=value,
    )
    return _asked(queue, user, request, wait_s)


def queue_report(queue: FilePath) -> QueueReport:
    """How a queue stands, from what is written down; needs no cluster.

    Args:
        queue: its folder, or its configuration.

    Raises:
        QueueMissingError: there is none.
    """
    return QueueLiveReader(queue_location(queue)).report()


def save_queue_page(queue: FilePath, path: FilePath) -> Path:
    """Write one self-contained page of a queue: its jobs over time, and its regions.

    Args:
        queue: its folder, or its configuration.
        path: file to write.

    Raises:
        QueueMissingError: there is no queue.
        RunDirectoryError: the page cannot be written.
    """
    view = QueueLiveReader(queue_location(queue)).view()
    body = "".join(queue_sections(view).values())
    return write_html(html_page(view.name, body), Path(path))


def _id() -> str:
    return secrets.token_hex(12)


def _asked(queue: FilePath, user: QueueUser, request: AnyRequest, wait_s: float) -> QueueAnswer:
    location = queue_location(queue)
    if not location.is_there():
        raise QueueMissingError(f"there is no queue in {location.shown}")
    store = location.store()
    journal, state = QueueJournal(store), QueueState()
    state.feed(journal.read())
    if state.config is None:
        raise QueueMissingError(f"the queue in {location.shown} was never served")
    _check_known(state.config, user)
    inbox.submit(store, user.tenant, inbox.signed(request, state.queue_id, user.token))
    deadline_s = time.monotonic() + wait_s
    while True:
        state.feed(journal.read())
        found = state.answers.get(request.id)
        if found is not None:
            _raise_refused(found)
            return QueueAnswer(request.id, True)
        if time.monotonic() > deadline_s:
            return QueueAnswer(request.id, False)
        time.sleep(_LOOK_S)


def _check_known(config: QueueConfig, user: QueueUser) -> None:
    """Refuse at once what the queue would drop without a word: it cannot know who says so."""
    tenant = config.tenants.get(user.tenant)
    if tenant is None:
        known = ", ".join(config.tenants)
        raise QueueRequestError(f"the queue has no tenant {user.tenant}; it has {known}")
    if key_of(user.token) != tenant.key:
        raise QueueDeniedError(
            f"this is not the token of tenant {user.tenant} in queue {config.name}",
            fix="Take the tenant's own. If its key is new in the queue's configuration, start the "
            "queue with that first.",
        )


def _raise_refused(answer: RequestAnswer) -> None:
    if answer.refused is not None:
        raise from_code(answer.code or "", answer.refused, None)


_ADVICE = "docs/operations/queue.md describes the file of a queue."


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
    location = QueueLocation.of(queue)
    location.make()
    serve_queue(queue, ExistingClusterConfig(address=address), longest_s)
    return location.uri


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


def queue_location(queue: FilePath) -> QueueLocation:
    """The location of a queue, by its folder or its configuration."""
    name = os.fspath(queue)
    if not is_s3(name) and name.endswith((".yaml", ".yml")):
        return QueueLocation.of(load_queue(name))
    return QueueLocation.at(name)


def names_queue(location: FilePath) -> bool:
    """Whether a location is a queue's folder or configuration, and so no run."""
    name = os.fspath(location)
    if is_s3(name):
        return QueueLocation.at(name).is_there()
    return name.endswith((".yaml", ".yml")) or (
        Path(name).is_dir() and QueueLocation.at(name).is_there()
    )


def _absolute(queue: QueueConfig) -> QueueConfig:
    """Name directories in full: the actor works elsewhere."""
    changes = {
        key: str(Path(value).absolute())
        for key, value in (("state", queue.state), ("runs", queue.runs))
        if not is_s3(value)
    }
    return queue.model_copy(update=changes)
