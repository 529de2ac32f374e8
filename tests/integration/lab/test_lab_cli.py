"""`geo-ray lab` as a user types it, on a lab that stays up between commands."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_ray.lab import records
from geo_ray.lab.lab import Lab
from tests.support.lab_support import WAIT_S, needs_lab

pytestmark = needs_lab

TOPOLOGY = """
name: mine
link: {rate_mbps: 50, delay_s: 0.001}
regions: [{name: A}, {name: B}]
"""


def geo_ray(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "geo_ray.cli.main", "lab", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=WAIT_S)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab of this process, for commands to be tried on."""
    path = tmp_path / "mine.yaml"
    path.write_text(TOPOLOGY)
    with Lab(path) as lab:
        yield lab


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Lab]:
    path = tmp_path / "mine.yaml"
    path.write_text(TOPOLOGY)
    up = geo_ray("up", str(path), "--set", "link.loss=0.5", "--detach")
    assert up.returncode == 0, up.stderr
    lab_id = re.findall(r"lab (\w+) stays up", up.stdout)[0]
    try:
        yield Lab.attach(lab_id)
    finally:
        records.down(lab_id)


def test_a_detached_lab_is_changed_used_and_taken_down(detached: Lab) -> None:
    lab, of = detached, ("--lab", detached.lab_id)
    assert lab.stats().links["A", "B"].loss == 0.5  # from --set
    for words in (
        ("set", "A", "B", "rate_mbps=7", "delay_s=0.002", "loss=0"),
        ("cap", "B", "--down", "9"),
        ("cut", "B", "A", "--one-way"),
    ):
        done = geo_ray(*words, *of)
        assert done.returncode == 0, done.stderr
    stats = lab.stats()
    link, back = stats.links["A", "B"], stats.links["B", "A"]
    assert (link.rate_mbps, link.delay_s, link.loss, link.is_cut) == (7.0, 0.002, 0.0, False)
    assert (back.rate_mbps, back.is_cut, stats.down["B"].rate_mbps) == (50.0, True, 9.0)

    shown = geo_ray("status", *of).stdout
    assert "10.2.0.1" in shown and "cut" in shown and "cubic" in shown
    assert geo_ray("heal", "A", "B", *of).returncode == 0
    assert not lab.stats().links["B", "A"].is_cut

    ran = geo_ray("run", *of, "B", "--", "sh", "-c", "ip -o -4 addr show wan0; exit 7")
    assert "10.2.0.1" in ran.stdout and ran.returncode == 7

    ran = geo_ray("run", *of, "A", "sh", "-c", "exit 3", "--lab")
    assert ran.returncode == 3

    down = geo_ray("down", *of)
    assert (down.returncode, down.stdout) == (0, f"lab {lab.lab_id} is down\n")
    assert lab.lab_id not in records.labs()
    assert "LAB_UNKNOWN" in geo_ray("set", "A", "B", "loss=0", *of).stderr


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("up", "no-such-preset"), 2, "flat-100"),
        (("up", "flat-100", "--set", "speed=1"), 2, "speed"),
        (("set", "A", "B", "speed=1"), 2, "speed"),
        (("status", "--lab", "zzz"), 9, "LAB_UNKNOWN"),
        (("run", "Z", "--", "true"), 2, "no region 'Z'"),
    ],
)
def test_errors_are_described(lab: Lab, words: tuple[str, ...], code: int, complaint: str) -> None:
    named = words[0] in ("set", "run")
    done = geo_ray(words[0], *(("--lab", lab.lab_id) if named else ()), *words[1:])
    assert done.returncode == code
    assert complaint in done.stderr


def test_a_lab_in_the_foreground_ends_with_ctrl_c() -> None:
    argv = [sys.executable, "-m", "geo_ray.cli.main", "lab", "up", "poor-10"]
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as up:
        assert up.stdout is not None
        said = (re.findall(r"lab (\w+) is up", line) for line in up.stdout)
        lab_id = next(found[0] for found in said if found)
        up.send_signal(signal.SIGINT)
        assert up.wait(WAIT_S) == 0
    assert not (records.BASE / lab_id).exists()
