"""A lab leaves nothing behind, however it ends; several live side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from geo_ray.base.errors import LabUnavailableError, LabUnknownError
from geo_ray.lab import lab as lab_module
from geo_ray.lab import namespace, records
from geo_ray.lab.lab import Lab
from geo_ray.lab.teardown import is_alive, named, read_record
from geo_ray.lab.topology import LabRegionConfig, Topology
from tests.support.lab_support import WAIT_S, needs_lab, until

TWO = Topology(name="two", regions=(LabRegionConfig(name="A"), LabRegionConfig(name="B")))
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
SCRIPT = """
import subprocess, sys, time
from geo_ray.lab.lab import Lab
from geo_ray.lab.topology import LabRegionConfig, Topology
with Lab(Topology(regions=(LabRegionConfig(name="A"), LabRegionConfig(name="B")))) as lab:
    # a grandchild in a session of its own, as a daemon would be
    lab.popen("A", ["sh", "-c", "setsid sleep 600 & echo $!; wait"])
    print(lab.lab_id, flush=True)
    time.sleep(600)
"""


class Left:
    """What a lab has made, taken while it is up, to be looked for afterwards."""

    def __init__(self, lab_id: str) -> None:
        self.directory = records.BASE / lab_id
        record = read_record(self.directory)
        self.relay = record["relay"]
        self.namespaces = record["namespaces"]
        assert all(namespace.path_of(name).exists() for name in self.namespaces)

    def is_nothing(self) -> bool:
        return not (
            self.directory.exists()
            or is_alive(self.relay)
            or any(namespace.path_of(name).exists() for name in self.namespaces)
        )


@needs_lab
def test_leaving_the_block_leaves_nothing() -> None:
    allowed = ALLOWED.read_text()
    with Lab(TWO) as lab:
        left = Left(lab.lab_id)
        child = lab.popen("A", ["sleep", "600"])
    assert left.is_nothing()
    assert child.wait(WAIT_S) != 0
    assert ALLOWED.read_text() == allowed
    lab.close()  # again, for good measure


@needs_lab
def test_an_error_inside_leaves_nothing() -> None:
    class OopsError(Exception):
        pass

    with pytest.raises(OopsError), Lab(TWO) as lab:
        left = Left(lab.lab_id)
        raise OopsError
    assert left.is_nothing()


@needs_lab
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_process_that_ends_with_a_lab_up_leaves_nothing(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as owner:
        assert owner.stdout is not None
        said = sorted([owner.stdout.readline().strip(), owner.stdout.readline().strip()], key=len)
        lab_id = next(word for word in said if (records.BASE / word).exists())
        grandchild = named(int(next(word for word in said if word != lab_id)))
        left = Left(lab_id)
        owner.send_signal(how)
        owner.wait(WAIT_S)
        until(left.is_nothing)
        until(lambda: not is_alive(grandchild))


@needs_lab
def test_the_next_lab_clears_up_when_owner_and_relay_were_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        said = [owner.stdout.readline().strip(), owner.stdout.readline().strip()]
        left = Left(next(word for word in said if (records.BASE / word).exists()))
        owner.send_signal(signal.SIGSTOP)  # so that it cannot act on the death of its relay
        os.kill(left.relay[0], signal.SIGKILL)
        owner.kill()
        owner.wait(WAIT_S)
    until(lambda: not is_alive(left.relay))
    assert left.directory.exists()
    with Lab(TWO):
        assert left.is_nothing()


@needs_lab
def test_two_labs_do_not_meet() -> None:
    with Lab(TWO) as one, Lab(TWO) as two:
        assert one.lab_id != two.lab_id
        one.set("A", "B", rate_mbps=3.0)
        assert two.stats().links["A", "B"].rate_mbps is None
        with pytest.raises(LabUnknownError, match=f"{one.lab_id}|{two.lab_id}"):
            Lab.attach()
        assert Lab.attach(one.lab_id).stats().links["A", "B"].rate_mbps == 3.0
        ids = {lab.inside("A", Path("/proc/thread-self/ns/net").readlink) for lab in (one, two)}
        assert len(ids) == 2


@needs_lab
def test_a_relay_that_dies_is_a_typed_error() -> None:
    from geo_ray.base.errors import LabDownError

    with Lab(TWO) as lab:
        left = Left(lab.lab_id)
        os.kill(left.relay[0], signal.SIGKILL)
        until(lambda: not is_alive(left.relay))
        with pytest.raises(LabDownError):
            lab.stats()
    assert left.is_nothing()


def test_without_root_a_lab_reports_missing_requirements() -> None:
    reason = lab_module.missing_requirements()
    if reason is None:
        code = "import os; from geo_ray.lab import lab; os.setuid(65534); lab.check_requirements()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "LAB_UNAVAILABLE" in done.stderr and "needs root" in done.stderr
    else:
        with pytest.raises(LabUnavailableError):
            Lab(TWO).start()
