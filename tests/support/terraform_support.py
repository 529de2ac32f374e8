"""Terraform as tests run it: a copy of infra/terraform, and AWS on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener
from urllib.request import Request as HttpRequest

import pytest
from moto.s3.models import FakeDeleteMarker
from moto.server import ThreadedMotoServer

from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from tests.support.cloud_servers import LoopbackCloud, Reply, Request

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra" / "terraform"
LONGEST_S = 900.0
PLUGINS = "GEO_RAY_TERRAFORM_PLUGINS"
_STANDARD_PLUGINS = (
    Path("/opt/tf-plugins"),
    Path.home() / ".terraform.d" / "plugins",
    Path("/usr/local/share/terraform/plugins"),
    Path("/usr/share/terraform/plugins"),
)


def terraform_program() -> str:
    """The program; skips the test where there is none."""
    program = os.environ.get("GEO_RAY_TERRAFORM") or shutil.which("terraform")
    if program is None:
        pytest.skip("no terraform: install it, or name it in GEO_RAY_TERRAFORM")
    return program


def aws_plugins() -> Path:
    """A mirror of providers that has AWS's; skips the test where there is none."""
    named = os.environ.get(PLUGINS)
    for place in [Path(named)] if named else _STANDARD_PLUGINS:
        if any(place.glob("registry.terraform.io/hashicorp/aws/5.*/*/terraform-provider-aws*")):
            return place
    pytest.skip(f"no provider hashicorp/aws 5.x for terraform: name a mirror in {PLUGINS}")


# A schema of AWS is 500 MB of small objects: by default Go goes through them again and again.
_SELDOM_COLLECTED = {"GOGC": "400"}
_START_S = 120.0


@contextmanager
def aws_provider(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of commands that share one process of AWS's provider.

    Starting it takes longer than what most commands do. All aliases of a configuration share the
    process too, so this is for commands that configure none: `validate`, and `test` with mocks.

    Args:
        folder: for the provider's files.
    """
    pattern = "registry.terraform.io/hashicorp/aws/5.*/*/terraform-provider-aws*"
    program = max(aws_plugins().glob(pattern))
    processes = SupervisedProcesses(folder)
    try:
        log = processes.start("aws", [str(program), "-debug"], _SELDOM_COLLECTED | _QUIET)
        deadline = time.monotonic() + _START_S
        while not (found := re.search(r"TF_REATTACH_PROVIDERS='(.+)'", _text(log))):
            processes.poll()
            assert "aws" not in processes.exit_codes, _text(log)
            assert time.monotonic() < deadline, _text(log)
            time.sleep(0.05)
        yield {"TF_REATTACH_PROVIDERS": found[1]}
    finally:
        processes.close()


_QUIET = {"TF_LOG": "ERROR", "TF_LOG_SDK": "ERROR"}  # else it writes a line for each resource


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


@dataclass(frozen=True)
class Terraform:
    """The program in one directory, with an environment of its own."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        """What it prints; fails the test with all that it said."""
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
        done = subprocess.run(
            [terraform_program(), f"-chdir={self.directory}", *words],
            env=kept
            | {"TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
            | _SELDOM_COLLECTED
            | dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"terraform {' '.join(words)}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def init(self, *, providers: bool = True) -> None:
        """Make it ready, without asking any registry."""
        more = [f"-plugin-dir={aws_plugins()}"] if providers else []
        self.run("init", "-input=false", "-no-color", "-backend=false", *more)

    def json(self, *words: str) -> Any:
        """What it prints as JSON."""
        return json.loads(self.run(*words))


def copied(tmp_path: Path) -> Path:
    """A copy of infra/terraform, in which Terraform may leave what it likes."""
    return Path(shutil.copytree(INFRA, tmp_path / "terraform"))


def without_what_moto_forgets(tree: Path) -> None:
    """Let a second apply pass over descriptions of rules, which moto does not give back."""
    kinds = {"nodes": "ingress", "head": "ingress", "cluster": "egress", "apis": "egress"}
    kept = "  lifecycle {\n    ignore_changes = [description]\n  }\n"
    rules = [
        f'resource "aws_vpc_security_group_{kind}_rule" "{name}" {{\n{kept}}}\n'
        for name, kind in kinds.items()
    ]
    (tree / "modules" / "aws" / "security" / "test_override.tf").write_text("".join(rules))


class BudgetFront:
    """Forwards to moto; keeps the tags and subscribers of a budget, which moto does not."""

    def __init__(self, moto: str) -> None:
        self._moto = moto
        self._subscribers: dict[str, list[dict[str, str]]] = {}
        self._tags: list[dict[str, str]] = []

    def __call__(self, request: Request) -> Reply:
        action = request.headers.get("x-amz-target", "").rpartition(".")[2]
        asked = json.loads(request.body or b"{}")
        for each in asked.get("NotificationsWithSubscribers", []):
            self._subscribers[_key(each["Notification"])] = each["Subscribers"]
        self._tags = asked.get("ResourceTags", self._tags)
        if action == "ListTagsForResource":
            return _json({"ResourceTags": self._tags})
        if action == "CreateNotification":
            self._subscribers[_key(asked["Notification"])] = asked["Subscribers"]
        if action == "DescribeSubscribersForNotification":
            held = self._subscribers[_key(asked["Notification"])]
            return _json({"Subscribers": held})
        kept = {k: v for k, v in request.headers.items() if k not in ("host", "content-length")}
        sent = HttpRequest(self._moto + request.path, request.body, kept, method="POST")
        try:
            with build_opener(ProxyHandler({})).open(sent, timeout=60) as reply:
                return Reply(reply.status, reply.headers["Content-Type"], reply.read().decode())
        except HTTPError as error:
            return Reply(error.code, error.headers["Content-Type"], error.read().decode())


def _json(body: dict[str, Any]) -> Reply:
    return Reply(200, "application/x-amz-json-1.1", json.dumps(body))


def _key(notification: dict[str, Any]) -> str:
    return f"{notification['NotificationType']} {float(notification['Threshold'])}"


@contextmanager
def aws_on_loopback() -> Iterator[dict[str, str]]:
    """The environment of somebody whose AWS is a moto server."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    # moto asks what is deleted to free its memory, and its markers have no answer: a bucket that
    # was versioned, and from which something was deleted then, could not be emptied any more.
    markers = patch.object(FakeDeleteMarker, "dispose", lambda _: None, create=True)
    markers.start()
    try:
        host, port = server.get_host_and_port()
        moto = f"http://{host}:{port}"
        reset = HttpRequest(f"{moto}/moto-api/reset", method="POST")
        build_opener(ProxyHandler({})).open(reset, timeout=60).close()
        with LoopbackCloud(BudgetFront(moto)) as budgets:
            yield {
                "AWS_ENDPOINT_URL": moto,
                "AWS_ENDPOINT_URL_BUDGETS": budgets.url,
                "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
                "AWS_SECRET_ACCESS_KEY": "canary/secret+9c41d2e8",
                "AWS_EC2_METADATA_DISABLED": "true",
                "NO_PROXY": "127.0.0.1",
            }
    finally:
        markers.stop()
        server.stop()
