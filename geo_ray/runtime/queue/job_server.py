"""A queue's submissions to Ray's job server."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import JsonValue
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from geo_ray.config.yaml_text import write_yaml
from geo_ray.errors import ClusterError

_CONFIG: Final = "config.yaml"
_ALREADY: Final = "already exists"
_TAIL: Final = 300  # characters of a message


@dataclass(frozen=True, slots=True)
class SubmissionTold:
    """What the job server says of a submission.

    Attributes:
        is_over: whether it has ended.
        succeeded: whether well.
        told: its message.
    """

    is_over: bool
    succeeded: bool = False
    told: str = ""


@dataclass(slots=True)
class QueueJobServer:
    """See the module.

    Attributes:
        address: of the job server, ``http://HOST:PORT``.
        save_s: for so long a job that is stopped may save.
    """

    address: str
    save_s: float
    _client: JobSubmissionClient | None = field(default=None)

    def submissions(self) -> dict[str, SubmissionTold]:
        """Return the job server's named submissions, of whomever they are.

        Raises:
            ClusterError: the job server does not answer.
        """
        try:
            listed = self._connected().list_jobs()
        except Exception as error:  # of many kinds, plain RuntimeError among them
            self._client = None
            raise ClusterError(f"the job server at {self.address} does not answer: {error}") from (
                error
            )
        return {
            job.submission_id: _told(job)
            for job in listed
            if job.submission_id is not None
        }

    def submit(
        self, name: str, tree: Mapping[str, JsonValue], working_dir: str | None, owner: str
    ) -> None:
        """Let a configuration train; does nothing if there is a submission of that name.

        Args:
            name: of the submission.
            tree: the configuration.
            working_dir: of the job's own code; None: it has none.
            owner: tenant, for who looks at the job server.

        Raises:
            ClusterError: the job server does not take it.
        """
        directory = Path(tempfile.mkdtemp(prefix="geo-ray-queue-"))
        try:
            if working_dir is not None:
                shutil.copytree(working_dir, directory, dirs_exist_ok=True)
            (directory / _CONFIG).write_text(write_yaml(dict(tree)), encoding="utf-8")
            command = [sys.executable, "-m", "geo_ray.cli.main", "train", _CONFIG]
            self._connected().submit_job(
                entrypoint=shlex.join([*command, "--allow-drift", "--plain"]),
                submission_id=name,
                runtime_env={
                    "working_dir": str(directory),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self.save_s))},
                },
                metadata={"geo_ray_tenant": owner},
            )
        except Exception as error:  # of many kinds, plain RuntimeError among them
            if _ALREADY in str(error):
                return
            raise ClusterError(f"{name} cannot be submitted: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def end(self, name: str) -> None:
        """End a submission, as `ray job stop` does; one that has ended stays so.

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


def _told(job: JobDetails) -> SubmissionTold:
    is_over = job.status.is_terminal()
    return SubmissionTold(
        is_over, job.status is JobStatus.SUCCEEDED, (job.message or "").strip()[-_TAIL:]
    )
