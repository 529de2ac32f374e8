"""Functions on the jobs of a queue: `submit_job`, `cancel_job`, `move_job`, `queue_report`."""

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
    """The requester.

    Attributes:
        tenant: name of the tenant in the queue's configuration.
        token: token of the tenant; not part of the repr.
    """

    tenant: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueAnswer:
    """The result of a request.

    Attributes:
        id: id of the request.
        is_processed: whether the queue has processed it; otherwise it is in the tenant's inbox.
    """

    id: str
    is_processed: bool


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
        queue: directory or configuration of the queue.
        config: configuration to train: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        user: the requester.
        name: name of the job; default: that of the configuration, in lower case.
        value: value of the job by completion time.
        hints: properties that the configuration does not state.
        working_dir: directory of the job's own code, readable by the queue's machine.
        wait_s: timeout for the queue to process the request.

    Raises:
        ConfigError: the configuration is invalid.
        SpeedUnknownError: the speed of the job is unknown.
        QueueDeniedError, QueueRequestError, TenantQuotaError: the queue refuses the request.
        QueueMissingError: there is no queue.
    """
    # PyTorch takes seconds to import, and the other requests do not need it.
    from geo_ray.api.auto import load_experiment
    from geo_ray.scheduler.queue.job_config import config_tree, spec_of

    with preserving_threads():
        source = source_of(config)
        experiment, _ = load_experiment(source, override_items(overrides))
        spec = spec_of(experiment, source.parent.absolute(), hints or JobHints())
    called = name or experiment.name.lower().replace(".", "-")
    if not is_job_name(called):
        raise QueueRequestError(
            f"invalid job name {called!r}",
            fix="Give a --name of at most 40 of a-z, 0-9, - and _, without - or _ at either end.",
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
    """Cancel a job; a running job is saved first.

    Args:
        queue: directory or configuration of the queue.
        job: name of the job.
        user: the requester.
        wait_s: timeout for the queue to process the request.

    Raises:
        QueueDeniedError, QueueRequestError: the queue refuses the request.
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
    """Change the position or the value of a job in a queue.

    Args:
        queue: directory or configuration of the queue.
        job: name of the job.
        user: the requester.
        position: first or last.
        before: job in front of which it is placed.
        value: changed parts of its value; other parts stay unchanged.
        wait_s: timeout for the queue to process the request.

    Raises:
        QueueDeniedError, QueueRequestError, TenantQuotaError: the queue refuses the request.
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
    """Return the state of a queue from its files; needs no cluster.

    Args:
        queue: directory or configuration of the queue.

    Raises:
        QueueMissingError: there is no queue.
    """
    return QueueLiveReader(queue_location(queue)).report()


def save_queue_page(queue: FilePath, path: FilePath) -> Path:
    """Write a self-contained page of a queue: its jobs over time, and its regions.

    Args:
        queue: directory or configuration of the queue.
        path: output file.

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
        raise QueueMissingError(f"no queue in {location.shown}")
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
    """Reject a request that the queue would drop silently, because it cannot authenticate it."""
    tenant = config.tenants.get(user.tenant)
    if tenant is None:
        known = ", ".join(config.tenants)
        raise QueueRequestError(f"the queue has no tenant {user.tenant}; it has {known}")
    if key_of(user.token) != tenant.key:
        raise QueueDeniedError(
            f"this is not the token of tenant {user.tenant} in queue {config.name}",
            fix="Use the tenant's token. If its key is new in the queue's configuration, restart "
            "the queue with that configuration first.",
        )


def _raise_refused(answer: RequestAnswer) -> None:
    if answer.refused is not None:
        raise from_code(answer.code or "", answer.refused, None)


_ADVICE = "docs/operations/queue.md describes queue files."


def load_queue(config: FilePath | QueueConfig, overrides: Overrides = ()) -> QueueConfig:
    """Read and check the configuration of a queue.

    Raises:
        ConfigError: names every invalid key.
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
    """Serve a queue from an actor of a cluster; return its directory.

    The actor continues when this process ends, and is restarted when it dies. The call can be
    repeated; with another configuration, the queue continues with that one.

    Args:
        config: configuration of the queue.
        overrides: changed values by dotted key.
        address: address of the cluster's head.
        longest_s: timeout until the queue is served.

    Raises:
        ConfigError: the configuration is invalid.
        ClusterError: there is no cluster, or it has no job server.
        QueueError: the queue is not served in time.
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
    """Stop serving a queue; its jobs continue, and the queue continues when it is started again.

    Args:
        config: configuration of the queue.
        overrides: changed values by dotted key.
        address: address of the cluster's head.

    Returns:
        Whether the queue was being served.
    """
    from geo_ray.scheduler.queue.actor import unserve_queue

    queue = load_queue(config, overrides)
    return unserve_queue(queue.name, ExistingClusterConfig(address=address))


def new_queue_token() -> tuple[str, str]:
    """Create a token for a tenant; return it and the key for the queue's configuration."""
    token = new_token()
    return token, key_of(token)


def queue_location(queue: FilePath) -> QueueLocation:
    """Return the location of a queue, given its directory or its configuration."""
    name = os.fspath(queue)
    if not is_s3(name) and name.endswith((".yaml", ".yml")):
        return QueueLocation.of(load_queue(name))
    return QueueLocation.at(name)


def names_queue(location: FilePath) -> bool:
    """Return whether a location is the directory or configuration of a queue rather than a run."""
    name = os.fspath(location)
    if is_s3(name):
        return QueueLocation.at(name).is_there()
    return name.endswith((".yaml", ".yml")) or (
        Path(name).is_dir() and QueueLocation.at(name).is_there()
    )


def _absolute(queue: QueueConfig) -> QueueConfig:
    """Make directories absolute, because the actor has another working directory."""
    changes = {
        key: str(Path(value).absolute())
        for key, value in (("state", queue.state), ("runs", queue.runs))
        if not is_s3(value)
    }
    return queue.model_copy(update=changes)
