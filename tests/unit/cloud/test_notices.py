"""Notices of three clouds, and the agent that acts on them, against metadata servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from geo_ray.base.errors import (
    CloudError,
    GeoRayError,
    ProviderRefusedError,
    ProviderUnreachableError,
)
from geo_ray.cloud.agent import NoticeAgent
from geo_ray.cloud.notices import (
    AwsNotices,
    FileNotices,
    MachineNotice,
    NoticeKind,
    TencentNotices,
    open_notices,
)
from geo_ray.prices.tencent import role_credentials

GOES = NoticeKind.TAKEN_BACK


class MetadataServer:
    """A metadata service: pages by path; with ``tokens``, IMDSv2 only."""

    def __init__(self, tokens: bool) -> None:
        self.pages: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.given = 0
        self.status = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")
                if not tokens or self.path != "/latest/api/token" or int(seconds) > 21600:
                    return self._say(403, "")
                outer.given += 1
                token = f"token-{outer.given}"
                outer.tokens = {token}
                self._say(200, token)

            def do_GET(self) -> None:
                if outer.status:
                    return self._say(outer.status, "")
                if tokens and self.headers.get("X-aws-ec2-metadata-token") not in outer.tokens:
                    return self._say(401, "")
                page = outer.pages.get(self.path.removeprefix("/latest/meta-data/"))
                self._say(404 if page is None else 200, page or "<html>not found</html>")

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def imds() -> Iterator[MetadataServer]:
    server = MetadataServer(tokens=True)
    server.pages["instance-id"] = "i-0abc"
    yield server
    server.close()


@pytest.fixture
def tencent() -> Iterator[MetadataServer]:
    server = MetadataServer(tokens=False)
    server.pages["instance-id"] = "ins-0abc"
    yield server
    server.close()


def unix_s(*when: int) -> float:
    return datetime(*when, tzinfo=UTC).timestamp()  # type: ignore[arg-type,misc]


def test_aws_gives_two_minutes_of_notice(imds: MetadataServer) -> None:
    reader = AwsNotices(imds.url)
    assert reader.read() is None and reader.machine_id() == "i-0abc"
    imds.pages["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-24T08:22:00Z"}'
    assert reader.read() == MachineNotice("i-0abc", unix_s(2026, 11, 24, 8, 22), GOES)
    assert imds.given == 1


def test_aws_recommends_and_then_takes(imds: MetadataServer) -> None:
    reader = AwsNotices(imds.url)
    imds.pages["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-24T08:00:00Z"}'
    assert reader.read() == MachineNotice("i-0abc", None, NoticeKind.RISK)
    imds.pages["spot/instance-action"] = '{"action": "stop", "time": "2026-11-24T08:22:00Z"}'
    found = reader.read()
    assert found is not None and found.kind is GOES


def test_a_token_that_ran_out_is_renewed(imds: MetadataServer) -> None:
    reader = AwsNotices(imds.url)
    assert reader.read() is None
    imds.tokens.clear()
    assert reader.read() is None and imds.given == 2


def test_tencents_time_is_that_of_utc_plus_8(tencent: MetadataServer) -> None:
    reader = TencentNotices(tencent.url)
    assert reader.read() is None and reader.machine_id() == "ins-0abc"
    tencent.pages["spot/termination-time"] = "2026-11-24 12:05:33\n"
    assert reader.read() == MachineNotice("ins-0abc", unix_s(2026, 11, 24, 4, 5, 33), GOES)


def test_a_notice_whose_time_makes_no_sense_is_one(
    imds: MetadataServer, tencent: MetadataServer
) -> None:
    tencent.pages["spot/termination-time"] = "soon"
    assert TencentNotices(tencent.url).read() == MachineNotice("ins-0abc", None, GOES)
    imds.pages["spot/instance-action"] = '{"action": "terminate", "time": 7}'
    assert AwsNotices(imds.url).read() == MachineNotice("i-0abc", None, GOES)


@pytest.mark.parametrize("cloud", ["aws", "tencent"])
def test_a_service_that_is_ill_or_away_is_an_outcome(
    cloud: str, imds: MetadataServer, tencent: MetadataServer
) -> None:
    server = imds if cloud == "aws" else tencent
    reader = open_notices(cloud, server.url)
    server.status = 500
    with pytest.raises(ProviderUnreachableError):
        reader.read()
    server.status = 0
    assert reader.read() is None
    server.pages["spot/instance-action"] = "<html>"
    if cloud == "aws":
        with pytest.raises(ProviderUnreachableError, match="invalid notice"):
            reader.read()
    with pytest.raises(ProviderUnreachableError, match="no metadata service"):
        open_notices(cloud, "http://127.0.0.1:9").read()


def test_the_local_cloud_has_a_file(tmp_path: Path) -> None:
    file = tmp_path / "i-1" / "notice.json"
    reader = FileNotices(file)
    assert reader.read() is None and reader.machine_id() == "i-1"
    file.parent.mkdir()
    file.write_text('{"unix_s": 12.5}')
    assert reader.read() == MachineNotice("i-1", 12.5, GOES)
    file.write_text("[]")
    with pytest.raises(ProviderUnreachableError):
        reader.read()
    with pytest.raises(ProviderRefusedError, match="--file"):
        open_notices("local")


def test_a_shell_may_ask(imds: MetadataServer) -> None:
    asked = [sys.executable, "-m", "geo_ray.cloud.notices", "--cloud", "aws"]
    asked += ["--url", imds.url]
    done = subprocess.run([*asked, "--machine-id"], capture_output=True, text=True, check=True)
    assert done.stdout == "i-0abc\n"
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout == "no notice\n"


def test_a_role_gives_credentials(tencent: MetadataServer) -> None:
    with pytest.raises(CloudError, match="role of the machine cannot be read"):
        role_credentials(tencent.url)
    tencent.pages["cam/security-credentials/"] = "geo-ray-node"
    told = {"TmpSecretId": "id", "TmpSecretKey": "key", "Token": "token", "Code": "Success"}
    tencent.pages["cam/security-credentials/geo-ray-node"] = json.dumps(told)
    assert role_credentials(tencent.url) == ("id", "key", "token")


# ------------------------------------------------------------------ the agent


class Said:
    """A reader with given results."""

    def __init__(self, *says: MachineNotice | GeoRayError | None) -> None:
        self.says = list(says)

    def machine_id(self) -> str:
        return "i-1"

    def read(self) -> MachineNotice | None:
        now = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(now, GeoRayError):
            raise now
        return now


def test_a_notice_drains_once_with_its_deadline() -> None:
    drained: list[float] = []
    notice = MachineNotice("i-1", 500.0, GOES)
    agent = NoticeAgent(Said(None, notice), lambda at, why: drained.append(at) is None)
    for now in range(10):
        agent.tick(float(now))
    assert drained == [500.0]


def test_another_deadline_drains_again() -> None:
    drained: list[float] = []
    first, second = MachineNotice("i-1", 500.0, GOES), MachineNotice("i-1", 400.0, GOES)
    agent = NoticeAgent(Said(first, first, second), lambda at, why: drained.append(at) is None)
    for now in range(5):
        agent.tick(float(now))
    assert drained == [500.0, 400.0]


def test_what_fails_is_tried_again() -> None:
    answers = iter([ConnectionError("no head"), False, True])
    asked: list[float] = []

    def drain(at: float, why: str) -> bool:
        asked.append(at)
        now = next(answers)
        if isinstance(now, Exception):
            raise now
        return bool(now)

    notice = MachineNotice("i-1", None, GOES)
    agent = NoticeAgent(Said(ProviderUnreachableError("away"), notice), drain)
    done = [agent.tick(1000.0 + second) for second in range(6)]
    assert done == [None, None, None, notice, None, None]
    assert asked == [1121.0, 1122.0, 1123.0]  # without a time: two minutes from then


@pytest.mark.parametrize("also_risk", [False, True])
def test_a_risk_drains_only_if_configured(also_risk: bool) -> None:
    drained: list[float] = []
    risk, sure = MachineNotice("i-1", None, NoticeKind.RISK), MachineNotice("i-1", 50.0, GOES)
    agent = NoticeAgent(
        Said(risk, risk, sure), lambda at, why: drained.append(at) is None, also_risk
    )
    for _ in range(4):
        agent.tick(0.0)
    assert drained == ([120.0, 50.0] if also_risk else [50.0])


def test_the_agent_is_small_until_it_hears_something() -> None:
    code = (
        "import sys; import geo_ray.cloud.agent as a\n"
        "assert not {'ray', 'torch', 'numpy', 'pyarrow'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True).returncode == 0
