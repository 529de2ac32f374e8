"""Workers report the memory of their GPU over the region's real sockets; torch.cuda is replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from geo_ray.runtime.device import DeviceReport
from geo_ray.telemetry.events import conform
from tests.support.region_support import InProcess, WorkerThread, experiment_of

NAME, TOTAL = "NVIDIA A100-SXM4-80GB", 80 * 10**9


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose peak a test sets."""
    gpu = SimpleNamespace(peak=0, asked=0)

    def peak_of(device: torch.device) -> int:
        gpu.asked += 1
        assert device == torch.device("cuda:1")
        return int(gpu.peak)

    about = SimpleNamespace(name=NAME, total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    return gpu


def test_a_report_follows_a_rise_of_the_peak_at_most_every_ten_seconds(gpu) -> None:
    report, gpu.peak = DeviceReport("cuda:1", 0.5), 100
    first = report.due(1000.0)
    assert first == {
        "op": "device", "device": NAME, "share": 0.5, "peak_bytes": 100, "total_bytes": TOTAL,
    }  # fmt: skip
    gpu.peak = 200
    assert report.due(1009.0) is None and gpu.asked == 1
    second = report.due(1010.0)
    assert second is not None and second["peak_bytes"] == 200
    assert report.due(1030.0) is None, "nothing new"


def test_a_worker_on_the_cpu_asks_for_nothing(gpu) -> None:
    assert DeviceReport("cpu").due(1000.0) is None and gpu.asked == 0


def test_the_event_of_a_region_has_the_gpus_of_its_workers(gpu, tmp_path: Path) -> None:
    gpu.peak = 5 * 10**9
    regions = [{"name": "us-east", "workers": 2}, {"name": "eu-west"}]
    with InProcess(experiment_of(regions=regions, train={"steps": 2}), tmp_path) as world:
        workers = []
        for name, site in world.sites.items():
            for rank in range(site.region.workers):
                loop = site.loop(rank)
                if name == "us-east":
                    loop._device = DeviceReport("cuda:1", 0.5)
                workers.append(WorkerThread(loop))
                workers[-1].start()
        for worker in workers:
            worker.result()
        found = world.sites["us-east"].event_buffer.take(100_000)
        devices = [event for event in found if event["kind"] == "device"]
        assert {event["worker"] for event in devices} == {0, 1} and len(devices) == 2
        for event in devices:
            fields = {k: v for k, v in event.items() if k not in ("kind", "t_s")}
            assert conform("device", event["t_s"], fields)["peak_bytes"] == gpu.peak
        others = world.sites["eu-west"].event_buffer.take(100_000)
        assert "device" not in {event["kind"] for event in others}
