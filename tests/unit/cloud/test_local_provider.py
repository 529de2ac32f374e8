"""The local cloud: processes, notices, and a clean end."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_ray.base.errors import ProviderRefusedError
from geo_ray.cloud.local import LocalProvider, read_catalog, write_catalog
from geo_ray.cloud.provider import LaunchRequest, MachineState
from tests.support.provider_support import CLUSTER, CloudBench, Sleeper, local_bench

LONGEST_S = 300.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[CloudBench]:
    with local_bench(tmp_path) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cloud"


def local(bench: CloudBench) -> LocalProvider:
    assert isinstance(bench.provider, LocalProvider)
    return bench.provider


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_below(root: Path) -> list[int]:
    """Return keepers and programs of a local cloud, by command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and str(root).encode() in told:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


class Tagged(Sleeper):
    """A program whose environment names the cloud, so that it can be found."""

    def __init__(self, root: Path) -> None:
        object.__setattr__(self, "root", root)

    def processes(self, place, request):  # type: ignore[no-untyped-def]
        ((name, (argv, env)),) = super().processes(place, request).items()
        return {name: (argv, {**env, "CLOUD": str(self.root)})}  # type: ignore[attr-defined]


def test_a_notice_is_observed_and_retained(bench: CloudBench) -> None:
    bench.provider.launch(bench.request("a", bench.spot))
    first, second = bench.until("a", count=2, state=MachineState.RUNNING)
    local(bench).preempt(first.id, notice_s=1.5)
    noticed = next(m for m in bench.machines("a") if m.id == first.id)
    assert noticed.ends_unix_s == pytest.approx(time.time() + 1.5, abs=1)
    (ended,) = bench.until("a", count=1, state=MachineState.ENDED)
    assert ended.id == first.id and noticed.ends_unix_s is not None
    assert time.time() >= noticed.ends_unix_s
    assert [m.id for m in bench.living()] == [second.id]


@pytest.mark.parametrize("how", ["kill", "terminate", "owner", "folder", "keeper", "time"])
def test_nothing_is_left_however_a_machine_ends(bench: CloudBench, root: Path, how: str) -> None:
    owner = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    catalog = read_catalog(root).model_copy(update={"owner_pid": owner.pid})
    if how == "time":
        catalog = catalog.model_copy(update={"longest_life_s": 1.0})
    write_catalog(root, catalog)
    provider = LocalProvider(root, Tagged(root))
    try:
        provider.launch(bench.request("x", count=1))
        if how != "time":
            (machine,) = bench.until("x", count=1, state=MachineState.RUNNING)
            wait(lambda: len(processes_below(root)) == 2)  # a keeper and its program
        match how:
            case "kill":
                provider.preempt(machine.id, notice_s=0)
            case "terminate":
                provider.terminate([machine.id])
            case "owner":
                owner.kill()
                owner.wait()
            case "folder":
                shutil.rmtree(root / "machines")
            case "keeper":
                (keeper,) = [
                    pid
                    for pid in processes_below(root)
                    if b"local_machine.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
                ]
                os.kill(keeper, signal.SIGKILL)
        wait(lambda: not processes_below(root))
        if how != "folder":
            bench.until("x", count=1, state=MachineState.ENDED)
            assert not Path(scratch_of(root)).exists()
    finally:
        owner.kill()
        owner.wait()


def scratch_of(root: Path) -> str:
    import json

    (record,) = (root / "machines").glob("*/machine.json")
    return str(json.loads(record.read_text())["scratch"])


def test_a_launch_that_broke_off_is_completed(bench: CloudBench, root: Path) -> None:
    """The second machine was never created: the launching process was killed in between."""
    wanted = bench.request("half")
    bench.provider.launch(wanted)
    bench.until("half", count=2, state=MachineState.RUNNING)
    made = sorted((root / "machines").iterdir())
    bench.provider.terminate([made[1].name])
    bench.until("half", count=1, state=MachineState.ENDED)
    shutil.rmtree(made[1])
    assert list(bench.other.launch(wanted)) == []
    found = bench.until("half", count=2, state=MachineState.RUNNING)
    assert {m.id for m in found} == {path.name for path in made}


def test_many_ask_the_same_at_once(bench: CloudBench, root: Path) -> None:
    wanted: LaunchRequest = bench.request("storm")
    threads = [
        threading.Thread(target=LocalProvider(root, Sleeper()).launch, args=(wanted,))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.until("storm", count=2, state=MachineState.RUNNING)
    assert len(bench.living()) == 2
    assert len({m.address for m in bench.living()}) == 2


def test_a_machine_outlives_the_process_that_launched_it(bench: CloudBench, root: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from geo_ray.cloud.provider import LaunchRequest, Pool, Market\n"
        "from geo_ray.cloud.local import LocalProvider\n"
        "from tests.support.provider_support import Sleeper, pool\n"
        "LocalProvider(Path(sys.argv[1]), Sleeper()).launch("
        f"LaunchRequest('gone', '{CLUSTER}', pool(), 1))"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)
    (machine,) = bench.until("gone", count=1, state=MachineState.RUNNING)
    bench.provider.terminate([machine.id])
    bench.until("gone", count=1, state=MachineState.ENDED)


def test_prices_and_availability_change_while_it_runs(bench: CloudBench, root: Path) -> None:
    catalog = read_catalog(root)
    dearer = [o.model_copy(update={"usd_per_hour": 9.0, "capacity": 0}) for o in catalog.offers]
    write_catalog(root, catalog.model_copy(update={"offers": tuple(dearer)}))
    (availability,) = bench.other.availability([bench.good])
    assert (availability.usd_per_hour, availability.available) == (9.0, 0)
    (failure,) = bench.provider.launch(bench.request("none"))
    assert failure.missing == 2


def test_a_directory_that_is_no_cloud_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProviderRefusedError, match="no local cloud"):
        LocalProvider(tmp_path / "none").list_machines(CLUSTER)
    (tmp_path / "catalog.json").write_text('{"offer": []}')
    with pytest.raises(ProviderRefusedError, match="offer"):
        LocalProvider(tmp_path).list_machines(CLUSTER)


def test_without_a_program_it_lists_and_launches_nothing(bench: CloudBench, root: Path) -> None:
    with pytest.raises(ProviderRefusedError, match="no program"):
        LocalProvider(root).launch(bench.request("no"))
    assert LocalProvider(root).list_machines(CLUSTER) == []


def test_killed_while_it_launches_it_leaves_what_the_same_request_completes(
    bench: CloudBench, root: Path
) -> None:
    """Kill the launching process at random points; a repeated request completes the launch."""
    chance = random.Random(14)
    fork = multiprocessing.get_context("fork")
    for number in range(10):
        wanted = LaunchRequest(f"cut-{number}", CLUSTER, bench.good, 3)
        for _ in range(3):
            process = fork.Process(target=LocalProvider(root, Sleeper()).launch, args=(wanted,))
            process.start()
            time.sleep(chance.uniform(0, 0.02))
            process.kill()
            process.join()
        assert list(bench.provider.launch(wanted)) == []
        made = bench.until(wanted.request_id, count=3, state=MachineState.RUNNING)
        assert len({m.address for m in made}) == 3
        assert len(bench.living()) == 3
        bench.provider.terminate([m.id for m in made])
        bench.until_gone(*(m.id for m in made))
