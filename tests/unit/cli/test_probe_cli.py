"""`geo-ray probe` between two processes, and in which order regions are probed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest
from click.testing import CliRunner, Result

from geo_ray.api.probe import probe_host, serve_probes
from geo_ray.base.errors import ConfigError, GeoRayError, LinkDownError
from geo_ray.cli.probe import probe
from geo_ray.transport.links import LinkRecord, LinkTable, load_links, save_links
from geo_ray.transport.probe.hosts import ProbeAddress, ProbeSide
from geo_ray.transport.probe.plan import ProbePlan, probe_rounds
from geo_ray.transport.security import cert_store

WAIT_S = 60.0
KEY = "0123456789abcdef-of-the-test"
QUICK = ("--duration", "0.2", "--no-udp", "--timeout", "60")


@contextmanager
def listening(*options: object, key: str | None = KEY) -> Iterator[tuple[str, str]]:
    """A listening process; yields its port and the key that it shows, if any."""
    environment = {k: v for k, v in os.environ.items() if k != "GEO_RAY_PROBE_KEY"}
    if key is not None:
        environment["GEO_RAY_PROBE_KEY"] = key
    command = [sys.executable, "-m", "geo_ray.cli.main", "probe", "--listen", "--once"]
    command += ["--bind", "127.0.0.1:0", *map(str, options)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        said, found = "", None
        while found is None and (line := process.stdout.readline()):
            said, found = said + line, re.search(r"port (\d+)", line)
        assert found is not None, said
        called = process.stdout.readline()
        shown = process.stdout.readline().rpartition(" ")[2].strip() if key is None else ""
        if "--certs" in options:
            shown = called
        yield found[1], shown
        assert process.wait(WAIT_S) == 0, process.stdout.read()
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()  # type: ignore[union-attr]


def run(
    *arguments: object,
    key: str | None = KEY,
    error: type[GeoRayError] | None = None,
    **more: object,
) -> Result:
    result = CliRunner().invoke(
        probe,
        [str(argument) for argument in arguments],
        env={"GEO_RAY_PROBE_KEY": key},
        **more,  # type: ignore[arg-type]
    )
    if error is not None:
        assert type(result.exception) is error, result.output
    return result


def test_two_hosts_measure_both_directions(tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    other = LinkRecord(
        src="ap", dst="eu", goodput_mbps=1.0, rtt_s=0.1, samples=1, measured_at_unix_s=0.0
    )
    save_links(LinkTable(links=(other,)), out)
    with listening("--region", "eu") as (port, _):
        address = f"127.0.0.1:{port}"
        wrong = ("--timeout", "2", "--out", out)
        refused = run(address, "--region", "us", *wrong, key="w" * 20, error=LinkDownError)
        assert "PEER_REFUSED" in str(refused.exception)
        result = run(address, "--region", "us", *QUICK, "--out", out)
        assert result.exit_code == 0, result.output
    table = load_links(out)
    assert table.get("us", "eu").goodput_mbps > 0 and table.get("eu", "us").goodput_mbps > 0
    assert table.get("ap", "eu") == other  # what was there before, and is old by now
    assert "eu -> ap" in result.output and "days old" in result.output
    assert KEY not in result.output


@pytest.mark.slow  # the parts are tested without a second process
def test_a_key_is_shown_once_and_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    with listening("--region", "eu", key=None) as (port, shown):
        assert len(shown) == 32
        arguments = (f"127.0.0.1:{port}", "--region", "us", *QUICK, "--out", out)
        result = run(*arguments, key=None, input=f"{shown}\n")
        assert result.exit_code == 0, result.output
        assert shown not in result.output
    assert load_links(out).holes() == []


@pytest.mark.slow
def test_regions_with_certificates_need_no_key(tmp_path: Path) -> None:
    cert_store.init(tmp_path)
    cert_store.issue(tmp_path, "us")
    cert_store.issue(tmp_path, "eu")
    out = tmp_path / "links.json"
    tls = ("--certs", tmp_path)
    with listening("--region", "eu", *tls) as (port, shown):
        assert "--peer eu" in shown
        address = f"127.0.0.1:{port}"
        missing = run(address, "--region", "us", *tls, *QUICK, error=ConfigError)
        assert "--peer" in str(missing.exception)
        other = ("--timeout", "2", "--out", out)
        run(address, "--region", "us", *tls, "--peer", "ap", *other, error=LinkDownError)
        result = run(address, "--region", "us", *tls, "--peer", "eu", *QUICK, "--out", out)
        assert result.exit_code == 0, result.output
    assert load_links(out).regions == ["eu", "us"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "TARGET, or --listen"),
        (("--listen", "h:1"), "TARGET, or --listen"),
        (("h:1", "--duration", "0"), "--duration"),
    ],
)
def test_what_cannot_be_meant_is_said(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and says in result.output


@pytest.mark.parametrize("target", ["nowhere", "host:port", "host:70000", ":80"])
def test_what_is_no_address_is_refused(target: str) -> None:
    refused = run(target, error=ConfigError).exception
    assert "neither HOST:PORT" in str(refused) and refused.exit_code == 2  # type: ignore[union-attr]


def test_two_hosts_measure_each_other_through_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at: Queue[ProbeAddress] = Queue()
    served: list[int] = []
    listener = threading.Thread(
        target=serve_probes,
        args=("127.0.0.1:0", ProbeSide("eu")),
        kwargs={"once": True, "on_listening": at.put, "on_served": served.append},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GEO_RAY_PROBE_KEY", raising=False)
        listener.start()
        place = at.get(timeout=WAIT_S)
        how = ProbePlan(duration_s=0.2, udp_s=0.0)
        side = ProbeSide("us", key=place.key)
        found = probe_host(f"127.0.0.1:{place.port}", side, how=how)
        listener.join(WAIT_S)
    assert served == [1] and place.key not in repr(place) + repr(side)
    assert repr(found) == "<Probe: 2 links, 0 not measured>"
    rows = found.table().to_pylist()
    assert {(row["src"], row["dst"]) for row in rows} == {("us", "eu"), ("eu", "us")}
    assert min(row["goodput_mbps"] for row in rows) > 0 and found._repr_html_().count("<tr>") == 3
    assert load_links(found.save(tmp_path / "links.json")) == found.links
    assert capsys.readouterr() == ("", "")


def test_a_short_key_is_refused() -> None:
    run("127.0.0.1:1", key="short", error=ConfigError)


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("count", range(2, 10))
@pytest.mark.parametrize("disjoint", [False, True])
def test_every_direction_once_and_no_region_twice_at_a_time(count: int, disjoint: bool) -> None:
    regions = [f"r{number}" for number in range(count)]
    rounds = probe_rounds(regions, disjoint=disjoint)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in regions for b in regions if a != b]
    for each in rounds:
        busy = [name for pair in each for name in pair]
        assert len(busy) == len(set(busy)) > 0
    assert len(rounds) == (2 * (count - 1 + count % 2) if disjoint else count * (count - 1))
