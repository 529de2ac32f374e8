"""Requests cannot give a tenant extra resources, other users' files, or access to other queues."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import ConfigError, QueueRequestError
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.job_server import JobCode
from geo_ray.scheduler.queue.job_spec import CancelRequest
from geo_ray.scheduler.queue.loop import Action, Submit
from tests.support.queue_support import TOKENS, job, queue_config, sim_queue


def refused(tmp_path: Path, request: Any, **changes: Any) -> tuple[str | None, str]:
    queue = sim_queue(tmp_path, **changes)
    asked = queue.submit("red", request)
    queue.tick()
    answer = queue.state.answers[asked]
    return answer.code, str(answer.refused)


# ---------------------------------------------------------------------- spec and configuration

LIES: dict[str, tuple[dict[str, Any], str]] = {
    "cpus": ({"cpus_per_worker": 64.0}, "cpus 1 in region us, but its configuration takes 64"),
    "gpus": ({"gpus_per_worker": 8.0}, "gpus 0 in region us, but its configuration takes 8"),
    "shards": ({"ps_shards": 50}, "server_cpus 1 in region us, but its configuration takes 25.5"),
    "workers": ({"workers": 100}, "workers 1 in region us, but its configuration takes 100"),
    "copies": ({"copies": 40}, "distinct regions of its cluster"),
    "elsewhere": ({"at": "eu"}, "distinct regions of its cluster"),
    "another region": ({"name": "eu"}, "declares the regions us; its"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_spec_that_says_less_than_the_configuration_takes_is_refused(
    tmp_path: Path, what: str
) -> None:
    change, message = LIES[what]
    honest = job("a")
    regions = [each | change for each in honest.config["regions"]]  # type: ignore[union-attr]
    code, text = refused(
        tmp_path, honest.model_copy(update={"config": honest.config | {"regions": regions}})
    )
    assert code == "QUEUE_REQUEST"
    assert message in text


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"regions": []},
        {"regions": 3},
        {"regions": [{"x": 1}]},
        {"regions": [{"name": "us"}] * 2},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, config: Any) -> None:
    code, _ = refused(tmp_path, job("a").model_copy(update={"config": config}))
    assert code == "QUEUE_REQUEST"


# ---------------------------------------------------------------------- code


def test_code_comes_from_the_tenants_own_directory_alone(tmp_path: Path) -> None:
    for number, (path, root, code) in enumerate(
        [
            ("/srv/red/job", None, "QUEUE_DENIED"),
            ("/srv/red/job", "/srv/red", None),
            ("/srv/redder/job", "/srv/red", "QUEUE_DENIED"),
            ("/srv/red/../blue", "/srv/red", "QUEUE_DENIED"),
            ("/srv/secrets", "/srv/red", "QUEUE_DENIED"),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        tenants = {name: each.model_dump() for name, each in queue_config().tenants.items()}
        tenants["red"]["working_dirs"] = root
        assert refused(place, job("a", working_dir=path), tenants=tenants)[0] == code, path


def test_a_tenants_directory_is_absolute() -> None:
    for bad in ("code", "/srv/../etc"):
        with pytest.raises((ConfigError, ValueError), match="absolute directory"):
            queue_config(tenants={"red": {"key": "0" * 64, "working_dirs": bad}})


def link_to_a_file(path: Path) -> None:
    (path / "x").symlink_to("/etc/hostname")


def link_to_a_device(path: Path) -> None:
    (path / "zero").symlink_to("/dev/zero")


def link_to_a_directory(path: Path) -> None:
    (path / "etc").symlink_to("/etc")


def pipe(path: Path) -> None:
    os.mkfifo(path / "pipe")


def large(path: Path) -> None:
    with (path / "big").open("wb") as file:
        file.truncate(101 * 1024 * 1024)


def deep(path: Path) -> None:
    (path / "/".join("d" * 40)).mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (link_to_a_file, "x: is a link"),
        (link_to_a_device, "zero: is a link"),
        (link_to_a_directory, "etc: is a link"),
        (pipe, "pipe, which is not a regular file"),
        (large, "more than 100 MiB"),
        (deep, "nested directories"),
    ],
)
def test_code_is_plain_files_of_a_bounded_size(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    code = tmp_path / "code" / "job"
    code.mkdir(parents=True)
    make(code)
    with pytest.raises(QueueRequestError, match=why):
        JobCode(str(code.parent), str(code)).copy(tmp_path / "copy")


def test_a_file_name_that_is_no_text_ends_its_job_alone(tmp_path: Path) -> None:
    code = tmp_path / "code" / "job"
    code.mkdir(parents=True)
    (code / os.fsdecode(b"\xff")).symlink_to("/etc/hostname")
    queue = sim_queue(tmp_path)

    def before(action: Action) -> None:
        if isinstance(action, Submit) and action.request.name == "a":
            JobCode(str(code.parent), str(code)).copy(tmp_path / "copy")

    queue.world.before_act = before
    queue.submit("red", job("a"))
    queue.submit("blue", job("b", ("eu",)))
    queue.tick()
    queue.tick()
    assert "\\udcff: is a link" in str(queue.state.jobs["a"].end)
    assert queue.world.living("b")


def test_code_behind_a_link_or_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "etc").symlink_to("/etc")
    for name in ("etc", "etc/ssl", "nowhere"):
        with pytest.raises(QueueRequestError, match="cannot be copied"):
            JobCode(str(tmp_path / "code"), f"{tmp_path}/code/{name}").copy(tmp_path / "copy")


def test_plain_code_is_copied(tmp_path: Path) -> None:
    code = tmp_path / "code" / "job"
    (code / "tools").mkdir(parents=True)
    (code / ".git").mkdir()
    (code / "task.py").write_text("x = 1")
    (code / "tools" / "run.sh").write_text("echo")
    (code / "tools" / "run.sh").chmod(0o755)
    JobCode(str(code.parent), str(code)).copy(tmp_path / "copy")
    made = sorted(str(each.relative_to(tmp_path / "copy")) for each in tmp_path.rglob("copy/**/*"))
    assert made == ["task.py", "tools", "tools/run.sh"]
    assert os.access(tmp_path / "copy" / "tools" / "run.sh", os.X_OK)


# ---------------------------------------------------------------------- another queue


def test_a_request_to_another_queue_of_the_same_name_is_not_heard(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", seconds=50.0))
    queue.tick()
    request = CancelRequest(id="old", sent_unix_s=1.0, job="a")
    inbox.submit(queue.store, "red", inbox.signed(request, "queue-of-others", TOKENS["red"]))
    assert any("not signed" in each for each in queue.tick())
    assert "old" not in queue.state.answers
    assert queue.state.jobs["a"].end is None
