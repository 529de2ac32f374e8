"""Traces in the published formats, as far as generated files cover them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geo_ray.base.errors import TraceError
from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.traces import cluster_jobs, read_trace
from geo_ray.scheduler.workload import LoadShape, generated_cluster

PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "attempts": [
            {
                "start_time": "2017-10-09 07:10:00",
                "end_time": "2017-10-09 08:10:00",
                "detail": [
                    {"ip": "m1", "gpus": ["gpu0", "gpu1"]},
                    {"ip": "m2", "gpus": ["gpu0", "gpu1"]},
                ],
            },
            {
                "start_time": "2017-10-09 09:00:00",
                "end_time": "2017-10-09 09:30:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
        ],
        "submitted_time": "2017-10-09 07:00:00",
        "user": "ce2f4c",
    },
    {"status": "Killed", "vc": "ee9e8c", "jobid": "application_2", "attempts": [],
     "submitted_time": "2017-10-09 07:30:00", "user": "u"},
    {"status": "Pass", "vc": "b", "jobid": "application_3",
     "attempts": [{"start_time": "2017-10-09 07:40:00", "end_time": "None",
                   "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}],
     "submitted_time": "2017-10-09 07:35:00", "user": "u"},
]  # fmt: skip
HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,uA,vc1,16,64,2,COMPLETED,2020-07-01 00:00:10,2020-07-01 00:01:00,2020-07-01 01:01:00,3600,50
2,uB,vc2,0,8,1,COMPLETED,2020-07-01 00:00:20,2020-07-01 00:00:30,2020-07-01 00:00:40,10,10
3,uB,vc2,1,4,1,CANCELLED,2020-07-01 00:00:40,None,2020-07-01 00:02:00,0,80
4,uC,vc3,1,8,1,FAILED,2020-07-01 00:10:10,2020-07-01 00:11:10,2020-07-01 00:13:10,120,60
"""
PAI = """\
j1,ps,1,Terminated,100.0,4000.0,600.0,30.0,,
j1,worker,4,Terminated,110.0,3900.0,800.0,29.3,100.0,V100
j2,tensorflow,1,Failed,200.0,500.0,400.0,20.0,50.0,T4
j3,worker,1,Waiting,,,400.0,20.0,50.0,T4
"""
POLLUX = """\
name,time,application,num_replicas,batch_size
cifar10-1,10,cifar10,2,256
bert-2,70,bert,4,48
"""


def written(folder: Path, kind: str, text: str | None = None) -> Path:
    texts = {"philly": json.dumps(PHILLY), "helios": HELIOS, "pai": PAI, "pollux": POLLUX}
    path = folder / f"{kind}.trace"
    path.write_text(texts[kind] if text is None else text)
    return path


def test_philly(tmp_path: Path) -> None:
    (job,) = read_trace(written(tmp_path, "philly"), "philly")
    assert (job.id, job.workers, job.gpus, job.duration_s) == ("application_1", 2, 2.0, 5400.0)
    assert job.tenant == "ee9e8c"


def test_helios(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "helios"), "helios")
    assert (first.id, first.workers, first.gpus, first.cpus) == ("1", 2, 8.0, 32.0)
    assert second.submit_s - first.submit_s == 600.0
    assert (second.duration_s, second.tenant) == (120.0, "vc3")


def test_pai(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "pai"), "pai")
    assert (first.id, first.workers, first.gpus, first.cpus) == ("j1", 4, 1.0, 8.0)
    assert first.duration_s == 3900.0
    assert (second.id, second.gpus, second.duration_s) == ("j2", 0.5, 300.0)


def test_pollux(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "pollux"), "pollux")
    assert (first.workers, first.model, second.model) == (2, "cifar10", "bert")
    assert first.duration_s == 1800.0


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("philly", "{", "not a JSON file"),
        ("philly", '[{"jobid": "a"}]', "submitted_time"),
        ("philly", json.dumps(PHILLY).replace("08:10:00", "06:10:00"), "ends before it starts"),
        ("philly", json.dumps(PHILLY).replace("2017-10-09 07:00:00", "soon"), "has no time"),
        ("philly", "[]", "no job"),
        ("helios", HELIOS.replace("gpu_num", "gpus"), "no column gpu_num"),
        ("helios", HELIOS.replace(",3600,", ",-3600,"), "duration is -3600"),
        ("helios", HELIOS.replace("2020-07-01 00:00:10", "yesterday"), "submit_time is not a time"),
        ("helios", HELIOS + "5,u\n", "line 6: not one field per column"),
        ("helios", "", "is empty"),
        ("helios", HELIOS.replace("07-01 01:01", "06-01 01:01"), "line 2: it ends before"),
        ("pai", PAI.replace("100.0,4000.0", "100.0,nan"), "end_time"),
        ("pai", PAI.replace("110.0,3900.0", "110.0,x"), "is not a number"),
        ("pollux", POLLUX.replace(",70,", ",-70,"), "time is -70"),
        ("pollux", POLLUX.replace("bert,4", "gpt,4"), "application 'gpt' is unknown"),
        ("pollux", POLLUX.replace("bert,4", "bert,0"), "num_replicas is 0"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, kind: str, text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(written(tmp_path, kind, text), kind)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    for kind in ("philly", "helios"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path / "none", kind)
    with pytest.raises(TraceError, match="unknown format"):
        read_trace(tmp_path, "slurm")


@pytest.mark.parametrize("kind", ["philly", "helios", "pai", "pollux"])
def test_a_trace_runs_on_a_cluster_of_regions(tmp_path: Path, kind: str) -> None:
    cluster = generated_cluster(LoadShape(12, 4, 200, regions=3, slot_s=300.0), 0)
    jobs = cluster_jobs(read_trace(written(tmp_path, kind), kind), cluster)
    assert jobs[0].arrival_slot == 0
    again = cluster_jobs(read_trace(written(tmp_path, kind), kind), cluster)
    assert [job.data for job in again] == [job.data for job in jobs]
    done = replay_jobs(cluster, jobs, POLICIES["fifo"]())
    check_schedule(done)
    assert set(done.finished_s) == {job.id for job in jobs}


def test_jobs_take_as_long_as_the_trace_says_where_they_have_what_they_had(tmp_path: Path) -> None:
    cluster = generated_cluster(LoadShape(12, 4, 200, slot_s=60.0), 0)
    traced = read_trace(written(tmp_path, "pollux"), "pollux")
    done = replay_jobs(cluster, cluster_jobs(traced, cluster), POLICIES["fifo"]())
    assert done.finished_s["cifar10-1"] == pytest.approx(1800.0, rel=1e-6)
