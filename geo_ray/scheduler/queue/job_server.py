"""Submissions of a queue to Ray's job server."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import JsonValue
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from geo_ray.base.errors import ClusterError, QueueRequestError
from geo_ray.base.text import printable
from geo_ray.base.yaml import write_yaml

_CONFIG: Final = "config.yaml"
_CHANGES: Final = [  # what the queue decides for each attempt
    word for key in ("regions", "members", "averager") for word in ("--allow-change", key)
]
MOST_CODE_BYTES: Final = 100 * 1024 * 1024
"""Maximum size of a job's own code."""
_MOST_FILES: Final = 10_000
_MOST_DEPTH: Final = 32
_BLOCK_BYTES: Final = 1 << 20
_NOT_CODE: Final = frozenset({".git", "__pycache__"})
_ALREADY: Final = "already exists"
_TAIL: Final = 300  # characters of a message
_ERROR: Final = re.compile(r"^error \[([A-Z][A-Z_]*)\] (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SubmissionReport:
    """Status of a submission at the job server.

    Attributes:
        is_over: whether it has ended.
        succeeded: whether it ended successfully.
        code: code of the error that `geo-ray train` ended with; None: none.
        message: message of the error, or of the job server.
    """

    is_over: bool
    succeeded: bool = False
    code: str | None = None
    message: str = ""


@dataclass(slots=True)
class JobCode:
    """Directory with the code of a tenant's job, with untrusted content.

    The queue's process reads it with its own permissions. To prevent the tenant from redirecting
    reads, links, devices, pipes and sockets are rejected at every step, and the total size is
    limited.

    Attributes:
        root: directory of the tenant's code, as set by the operator of the queue.
        path: directory of the job, below ``root``.
    """

    root: str
    path: str
    _files: int = 0
    _bytes: int = 0

    def copy(self, target: Path) -> None:
        """Copy its regular files to a directory.

        Raises:
            QueueRequestError: the code is missing, outside the directory, too large, or contains
                links or special files.
            OSError: the copy cannot be written.
        """
        parts = Path(self.path).relative_to(self.root).parts
        with ExitStack() as stack:
            at = self._open(self.root, None, stack, os.O_DIRECTORY)
            for part in parts:
                at = self._open(part, at, stack, os.O_DIRECTORY | os.O_NOFOLLOW)
            self._copy(at, target, ())

    def _copy(self, source: int, target: Path, place: tuple[str, ...]) -> None:
        if len(place) > _MOST_DEPTH:
            raise self._refused(f"has more than {_MOST_DEPTH} nested directories")
        target.mkdir(exist_ok=True)
        for name in sorted(os.listdir(source)):
            if name in _NOT_CODE:
                continue
            with ExitStack() as stack:
                self._files += 1
                if self._files > _MOST_FILES:
                    raise self._refused(f"has more than {_MOST_FILES:,} files")
                shown = "/".join((*place, name))
                opened = self._open(name, source, stack, os.O_NOFOLLOW | os.O_NONBLOCK, shown)
                about = os.fstat(opened)
                if stat.S_ISDIR(about.st_mode):
                    self._copy(opened, target / name, (*place, name))
                elif stat.S_ISREG(about.st_mode):
                    self._copy_file(opened, target / name)
                    (target / name).chmod(0o755 if about.st_mode & 0o100 else 0o644)
                else:
                    raise self._refused(f"has {shown}, which is not a regular file")

    def _copy_file(self, source: int, target: Path) -> None:
        with target.open("wb") as file:
            while block := os.read(source, _BLOCK_BYTES):
                self._bytes += len(block)
                if self._bytes > MOST_CODE_BYTES:
                    raise self._refused(f"has more than {MOST_CODE_BYTES >> 20} MiB")
                file.write(block)

    def _open(
        self, name: str, at: int | None, stack: ExitStack, flags: int, shown: str = ""
    ) -> int:
        try:
            found = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=at)
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else (error.strerror or "").lower()
            raise self._refused(f"cannot be copied: {shown or name}: {why}") from error
        stack.callback(os.close, found)
        return found

    def _refused(self, why: str) -> QueueRequestError:
        return QueueRequestError(
            printable(f"the code of the job, {self.path}, {why}"),
            fix="Use a directory that contains only regular files.",
        )


@dataclass(slots=True)
class QueueJobServer:
    """Client of Ray's job server; see the module.

    Attributes:
        address: URL of the job server, ``http://HOST:PORT``.
        save_s: seconds in which a stopped job may save.
    """

    address: str
    save_s: float
    _client: JobSubmissionClient | None = field(default=None)

    def submissions(self) -> dict[str, SubmissionReport]:
        """Return all named submissions of the job server, by name.

        Raises:
            ClusterError: the job server does not answer.
        """
        try:
            listed = self._connected().list_jobs()
        except Exception as error:  # of many types, including RuntimeError
            self._client = None
            raise ClusterError(f"the job server at {self.address} does not answer: {error}") from (
                error
            )
        return {
            job.submission_id: submission_report(job)
            for job in listed
            if job.submission_id is not None
        }

    def submit(
        self, name: str, tree: Mapping[str, JsonValue], code: JobCode | None, owner: str
    ) -> None:
        """Submit a configuration; does nothing if a submission of that name exists.

        Args:
            name: name of the submission.
            tree: the configuration.
            code: code of the job; None: none.
            owner: tenant, shown in the job server.

        Raises:
            QueueRequestError: the code is not allowed.
            ClusterError: the job server refuses it.
        """
        directory = Path(tempfile.mkdtemp(prefix="geo-ray-queue-"))
        try:
            if code is not None:
                code.copy(directory)
            (directory / _CONFIG).write_text(write_yaml(dict(tree)), encoding="utf-8")
            command = [sys.executable, "-m", "geo_ray.cli.main", "train", _CONFIG]
            self._connected().submit_job(
                entrypoint=shlex.join([*command, *_CHANGES, "--plain"]),
                submission_id=name,
                runtime_env={
                    "working_dir": str(directory),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self.save_s))},
                },
                metadata={"geo_ray_tenant": owner},
            )
        except QueueRequestError:
            raise
        except Exception as error:  # of many types, including RuntimeError
            if _ALREADY in str(error):
                return
            raise ClusterError(f"{name} cannot be submitted: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def end(self, name: str) -> None:
        """Stop a submission, as `ray job stop` does; an ended one stays ended.

        Raises:
            ClusterError: the job server does not answer.
        """
        try:
            self._connected().stop_job(name)
        except Exception as error:  # as above
            raise ClusterError(f"{name} cannot be ended: {error}") from error

    def _connected(self) -> JobSubmissionClient:
        if self._client is None:
            self._client = JobSubmissionClient(self.address)
        return self._client


def submission_report(job: JobDetails) -> SubmissionReport:
    """Return the status of a submission and the last error of its job."""
    message = (job.message or "").strip()
    errors = _ERROR.findall(message)  # the job server appends the job's last lines to its message
    code, text = errors[-1] if errors else (None, message[-_TAIL:])
    succeeded = job.status is JobStatus.SUCCEEDED
    return SubmissionReport(job.status.is_terminal(), succeeded, code, text[:_TAIL])
