"""geo_ray: train one PyTorch model on data that must stay in several cloud regions.

What the command line does, as functions: ``geo_ray.train``, ``simulate``, ``compare``, ``plan``,
``profile`` and so on; docs/python.md. Each is imported when it is first asked for, so that
``import geo_ray`` waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from geo_ray.base.version import __version__ as __version__

if TYPE_CHECKING:
    from geo_ray.api.certs import CertificateList as CertificateList
    from geo_ray.api.certs import certs as certs
    from geo_ray.api.certs import init_certs as init_certs
    from geo_ray.api.certs import issue_cert as issue_cert
    from geo_ray.api.certs import renew_ca as renew_ca
    from geo_ray.api.certs import renew_certs as renew_certs
    from geo_ray.api.certs import revoke_cert as revoke_cert
    from geo_ray.api.certs import rotate_ca as rotate_ca
    from geo_ray.api.check import PromiseCheck as PromiseCheck
    from geo_ray.api.check import RunCheck as RunCheck
    from geo_ray.api.check import check as check
    from geo_ray.api.check import check_run as check_run
    from geo_ray.api.clusters import UpCluster as UpCluster
    from geo_ray.api.clusters import cluster_status as cluster_status
    from geo_ray.api.clusters import down as down
    from geo_ray.api.clusters import up as up
    from geo_ray.api.clusters import up_offer as up_offer
    from geo_ray.api.columns import DataStatistics as DataStatistics
    from geo_ray.api.columns import DataSurvey as DataSurvey
    from geo_ray.api.columns import WantedStatistics as WantedStatistics
    from geo_ray.api.columns import data_stats as data_stats
    from geo_ray.api.columns import inspect_data as inspect_data
    from geo_ray.api.columns import merge_data_stats as merge_data_stats
    from geo_ray.api.compare import ComparisonResult as ComparisonResult
    from geo_ray.api.compare import LossGrid as LossGrid
    from geo_ray.api.compare import LossProfileResult as LossProfileResult
    from geo_ray.api.compare import compare as compare
    from geo_ray.api.compare import profile_loss as profile_loss
    from geo_ray.api.config import config_schema as config_schema
    from geo_ray.api.config import init_project as init_project
    from geo_ray.api.config import load_config as load_config
    from geo_ray.api.data import DataCheck as DataCheck
    from geo_ray.api.data import RegionData as RegionData
    from geo_ray.api.data import SourceFiles as SourceFiles
    from geo_ray.api.data import check_data as check_data
    from geo_ray.api.data import merge_data as merge_data
    from geo_ray.api.data import shard_data as shard_data
    from geo_ray.api.display import Table as Table
    from geo_ray.api.inventory import Inventory as Inventory
    from geo_ray.api.inventory import inventory as inventory
    from geo_ray.api.live import LivePage as LivePage
    from geo_ray.api.live import export_events as export_events
    from geo_ray.api.live import follow_view as follow_view
    from geo_ray.api.live import watch as watch
    from geo_ray.api.plan import PlanInputs as PlanInputs
    from geo_ray.api.plan import PlanResult as PlanResult
    from geo_ray.api.plan import ProfileGrid as ProfileGrid
    from geo_ray.api.plan import ProfileResult as ProfileResult
    from geo_ray.api.plan import plan as plan
    from geo_ray.api.plan import profile as profile
    from geo_ray.api.plan import replan as replan
    from geo_ray.api.prices import PriceList as PriceList
    from geo_ray.api.prices import PriceRefresh as PriceRefresh
    from geo_ray.api.prices import prices as prices
    from geo_ray.api.prices import refresh_prices as refresh_prices
    from geo_ray.api.probe import ProbeResult as ProbeResult
    from geo_ray.api.probe import probe as probe
    from geo_ray.api.probe import probe_host as probe_host
    from geo_ray.api.probe import serve_probes as serve_probes
    from geo_ray.api.program import TrainingNode as TrainingNode
    from geo_ray.api.program import price_program as price_program
    from geo_ray.api.program import training_program as training_program
    from geo_ray.api.queue import QueueAnswer as QueueAnswer
    from geo_ray.api.queue import QueueUser as QueueUser
    from geo_ray.api.queue import cancel_job as cancel_job
    from geo_ray.api.queue import move_job as move_job
    from geo_ray.api.queue import queue_report as queue_report
    from geo_ray.api.queue import save_queue_page as save_queue_page
    from geo_ray.api.queue import submit_job as submit_job
    from geo_ray.api.queue_server import load_queue as load_queue
    from geo_ray.api.queue_server import names_queue as names_queue
    from geo_ray.api.queue_server import new_queue_token as new_queue_token
    from geo_ray.api.queue_server import start_queue as start_queue
    from geo_ray.api.queue_server import stop_queue as stop_queue
    from geo_ray.api.run import Run as Run
    from geo_ray.api.run import open_run as open_run
    from geo_ray.api.schedule import ScheduleResult as ScheduleResult
    from geo_ray.api.schedule import schedule as schedule
    from geo_ray.api.status import change_members as change_members
    from geo_ray.api.status import checkpoints as checkpoints
    from geo_ray.api.status import follow_status as follow_status
    from geo_ray.api.status import members as members
    from geo_ray.api.status import report as report
    from geo_ray.api.status import status as status
    from geo_ray.api.status import stop as stop
    from geo_ray.api.train import simulate as simulate
    from geo_ray.api.train import train as train
    from geo_ray.api.tune import TuningResult as TuningResult
    from geo_ray.api.tune import tune as tune
    from geo_ray.base.errors import GeoRayError as GeoRayError
    from geo_ray.base.errors import InterruptedRunError as InterruptedRunError
    from geo_ray.base.model import StrictModel
    from geo_ray.cloud.cluster.down import EndedCluster as EndedCluster
    from geo_ray.cloud.cluster.offer import ClusterOffer as ClusterOffer
    from geo_ray.cloud.cluster.status import ClusterReport as ClusterReport
    from geo_ray.data.files.options import ReadOptions as ReadOptions
    from geo_ray.data.tasks.base import Dataset as Dataset
    from geo_ray.data.tasks.base import Task as Task
    from geo_ray.data.tasks.groups import ParameterGroup as ParameterGroup
    from geo_ray.data.tasks.groups import undecayed as undecayed
    from geo_ray.experiment.experiment import Experiment as Experiment
    from geo_ray.lab.lab import Lab as Lab
    from geo_ray.program.calls import batched_handler as batched_handler
    from geo_ray.program.calls import gathered as gathered
    from geo_ray.program.clock import here as here
    from geo_ray.program.graph import NodeGroup as NodeGroup
    from geo_ray.program.graph import NodeHandle as NodeHandle
    from geo_ray.program.graph import NodeRestarts as NodeRestarts
    from geo_ray.program.graph import Program as Program
    from geo_ray.program.graph import ProgramNode as ProgramNode
    from geo_ray.program.graph import load_program as load_program
    from geo_ray.program.result import ProgramResult as ProgramResult
    from geo_ray.program.run import run_program as run_program
    from geo_ray.scheduler.queue.config import QueueConfig as QueueConfig
    from geo_ray.scheduler.queue.job_spec import JobHints as JobHints
    from geo_ray.scheduler.queue.job_spec import JobWorth as JobWorth
    from geo_ray.scheduler.queue.job_spec import WorthChange as WorthChange
    from geo_ray.scheduler.queue.report import QueueReport as QueueReport
    from geo_ray.telemetry.events import Event as Event
    from geo_ray.telemetry.status import RunStatus as RunStatus
    from geo_ray.telemetry.summary import Summary as Summary
    from geo_ray.transport.emulation import LinkSpec as LinkSpec
    from geo_ray.transport.probe.hosts import ProbeAddress as ProbeAddress
    from geo_ray.transport.probe.hosts import ProbeSide as ProbeSide
    from geo_ray.transport.probe.plan import ProbePlan as ProbePlan

    Options = StrictModel

_WHERE = {
    "CertificateList": "api.certs",
    "certs": "api.certs",
    "init_certs": "api.certs",
    "issue_cert": "api.certs",
    "renew_ca": "api.certs",
    "renew_certs": "api.certs",
    "revoke_cert": "api.certs",
    "rotate_ca": "api.certs",
    "PromiseCheck": "api.check",
    "check": "api.check",
    "ClusterOffer": "cloud.cluster.offer",
    "ClusterReport": "cloud.cluster.status",
    "EndedCluster": "cloud.cluster.down",
    "UpCluster": "api.clusters",
    "cluster_status": "api.clusters",
    "down": "api.clusters",
    "up": "api.clusters",
    "up_offer": "api.clusters",
    "DataSurvey": "api.columns",
    "DataStatistics": "api.columns",
    "WantedStatistics": "api.columns",
    "data_stats": "api.columns",
    "inspect_data": "api.columns",
    "merge_data_stats": "api.columns",
    "ComparisonResult": "api.compare",
    "compare": "api.compare",
    "DataCheck": "api.data",
    "RegionData": "api.data",
    "SourceFiles": "api.data",
    "check_data": "api.data",
    "merge_data": "api.data",
    "shard_data": "api.data",
    "export_events": "api.live",
    "config_schema": "api.config",
    "load_config": "api.config",
    "LivePage": "api.live",
    "follow_view": "api.live",
    "watch": "api.live",
    "Inventory": "api.inventory",
    "inventory": "api.inventory",
    "LossGrid": "api.compare",
    "LossProfileResult": "api.compare",
    "profile_loss": "api.compare",
    "PlanInputs": "api.plan",
    "PlanResult": "api.plan",
    "ProfileGrid": "api.plan",
    "ProfileResult": "api.plan",
    "plan": "api.plan",
    "profile": "api.plan",
    "replan": "api.plan",
    "PriceList": "api.prices",
    "PriceRefresh": "api.prices",
    "prices": "api.prices",
    "refresh_prices": "api.prices",
    "ProbeResult": "api.probe",
    "probe": "api.probe",
    "probe_host": "api.probe",
    "serve_probes": "api.probe",
    "price_program": "api.program",
    "run_program": "program.run",
    "TrainingNode": "api.program",
    "training_program": "api.program",
    "JobHints": "scheduler.queue.job_spec",
    "JobWorth": "scheduler.queue.job_spec",
    "QueueAnswer": "api.queue",
    "QueueConfig": "scheduler.queue.config",
    "QueueReport": "scheduler.queue.report",
    "QueueUser": "api.queue",
    "WorthChange": "scheduler.queue.job_spec",
    "cancel_job": "api.queue",
    "load_queue": "api.queue_server",
    "move_job": "api.queue",
    "names_queue": "api.queue_server",
    "new_queue_token": "api.queue_server",
    "queue_report": "api.queue",
    "start_queue": "api.queue_server",
    "stop_queue": "api.queue_server",
    "save_queue_page": "api.queue",
    "submit_job": "api.queue",
    "Run": "api.run",
    "open_run": "api.run",
    "report": "api.status",
    "RunCheck": "api.check",
    "check_run": "api.check",
    "checkpoints": "api.status",
    "ScheduleResult": "api.schedule",
    "schedule": "api.schedule",
    "init_project": "api.config",
    "RunStatus": "telemetry.status",
    "change_members": "api.status",
    "follow_status": "api.status",
    "members": "api.status",
    "status": "api.status",
    "simulate": "api.train",
    "stop": "api.status",
    "train": "api.train",
    "Table": "api.display",
    "TuningResult": "api.tune",
    "tune": "api.tune",
    "Options": "base.model:StrictModel",
    "Experiment": "experiment.experiment",
    "ReadOptions": "data.files.options",
    "GeoRayError": "base.errors",
    "InterruptedRunError": "base.errors",
    "Lab": "lab.lab",
    "ProbeAddress": "transport.probe.hosts",
    "ProbeSide": "transport.probe.hosts",
    "ProbePlan": "transport.probe.plan",
    "Event": "telemetry.events",
    "Summary": "telemetry.summary",
    "batched_handler": "program.calls",
    "gathered": "program.calls",
    "Program": "program.graph",
    "load_program": "program.graph",
    "NodeGroup": "program.graph",
    "NodeHandle": "program.graph",
    "NodeRestarts": "program.graph",
    "ProgramNode": "program.graph",
    "ProgramResult": "program.result",
    "here": "program.clock",
    "LinkSpec": "transport.emulation",
    "Dataset": "data.tasks.base",
    "Task": "data.tasks.base",
    "ParameterGroup": "data.tasks.groups",
    "undecayed": "data.tasks.groups",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    """The function or class of that name, imported now."""
    if name not in _WHERE:
        raise AttributeError(f"module 'geo_ray' has no attribute {name!r}")
    module, _, own = _WHERE[name].partition(":")
    found = getattr(importlib.import_module(f"geo_ray.{module}"), own or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Every public name, for completion."""
    return sorted(set(globals()) | set(_WHERE))
