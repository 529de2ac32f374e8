"""geo_ray: train one PyTorch model on data that must stay in several cloud regions.

What the command line does, as functions: ``geo_ray.train``, ``simulate``, ``compare``, ``plan``,
``profile`` and so on; docs/python.md. Each is imported when it is first asked for, so that
``import geo_ray`` waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from geo_ray.version import __version__ as __version__

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
    from geo_ray.api.check import check as check
    from geo_ray.api.clusters import ClusterOffer as ClusterOffer
    from geo_ray.api.clusters import ClusterReport as ClusterReport
    from geo_ray.api.clusters import EndedCluster as EndedCluster
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
    from geo_ray.api.comparing import ComparisonResult as ComparisonResult
    from geo_ray.api.comparing import compare as compare
    from geo_ray.api.data import DataCheck as DataCheck
    from geo_ray.api.data import RegionData as RegionData
    from geo_ray.api.data import SourceFiles as SourceFiles
    from geo_ray.api.data import check_data as check_data
    from geo_ray.api.data import merge_data as merge_data
    from geo_ray.api.data import shard_data as shard_data
    from geo_ray.api.inputs import config_schema as config_schema
    from geo_ray.api.inputs import load_config as load_config
    from geo_ray.api.inventory import Inventory as Inventory
    from geo_ray.api.inventory import inventory as inventory
    from geo_ray.api.loss_profile import LossGrid as LossGrid
    from geo_ray.api.loss_profile import LossProfileResult as LossProfileResult
    from geo_ray.api.loss_profile import profile_loss as profile_loss
    from geo_ray.api.observe.export import export_events as export_events
    from geo_ray.api.observe.live import LivePage as LivePage
    from geo_ray.api.observe.live import follow_view as follow_view
    from geo_ray.api.observe.live import watch as watch
    from geo_ray.api.planning import PlanInputs as PlanInputs
    from geo_ray.api.planning import PlanResult as PlanResult
    from geo_ray.api.planning import ProfileGrid as ProfileGrid
    from geo_ray.api.planning import ProfileResult as ProfileResult
    from geo_ray.api.planning import plan as plan
    from geo_ray.api.planning import profile as profile
    from geo_ray.api.planning import replan as replan
    from geo_ray.api.prices import PriceList as PriceList
    from geo_ray.api.prices import PriceRefresh as PriceRefresh
    from geo_ray.api.prices import prices as prices
    from geo_ray.api.prices import refresh_prices as refresh_prices
    from geo_ray.api.probing import ProbeResult as ProbeResult
    from geo_ray.api.probing import probe as probe
    from geo_ray.api.probing import probe_host as probe_host
    from geo_ray.api.probing import serve_probes as serve_probes
    from geo_ray.api.programs.pricing import price_program as price_program
    from geo_ray.api.programs.training import TrainingNode as TrainingNode
    from geo_ray.api.programs.training import training_program as training_program
    from geo_ray.api.queue.jobs import JobHints as JobHints
    from geo_ray.api.queue.jobs import JobWorth as JobWorth
    from geo_ray.api.queue.jobs import QueueAnswer as QueueAnswer
    from geo_ray.api.queue.jobs import QueueReport as QueueReport
    from geo_ray.api.queue.jobs import QueueUser as QueueUser
    from geo_ray.api.queue.jobs import WorthChange as WorthChange
    from geo_ray.api.queue.jobs import cancel_job as cancel_job
    from geo_ray.api.queue.jobs import move_job as move_job
    from geo_ray.api.queue.jobs import queue_report as queue_report
    from geo_ray.api.queue.jobs import save_queue_page as save_queue_page
    from geo_ray.api.queue.jobs import submit_job as submit_job
    from geo_ray.api.queue.serve import QueueConfig as QueueConfig
    from geo_ray.api.queue.serve import load_queue as load_queue
    from geo_ray.api.queue.serve import names_queue as names_queue
    from geo_ray.api.queue.serve import new_queue_token as new_queue_token
    from geo_ray.api.queue.serve import start_queue as start_queue
    from geo_ray.api.queue.serve import stop_queue as stop_queue
    from geo_ray.api.run import Run as Run
    from geo_ray.api.run import open_run as open_run
    from geo_ray.api.run_check import RunCheck as RunCheck
    from geo_ray.api.run_check import check_run as check_run
    from geo_ray.api.scheduling import ScheduleResult as ScheduleResult
    from geo_ray.api.scheduling import schedule as schedule
    from geo_ray.api.starters import init_project as init_project
    from geo_ray.api.status import RunStatus as RunStatus
    from geo_ray.api.status import change_members as change_members
    from geo_ray.api.status import checkpoints as checkpoints
    from geo_ray.api.status import follow_status as follow_status
    from geo_ray.api.status import members as members
    from geo_ray.api.status import report as report
    from geo_ray.api.status import status as status
    from geo_ray.api.status import stop as stop
    from geo_ray.api.tables import Table as Table
    from geo_ray.api.training import simulate as simulate
    from geo_ray.api.training import train as train
    from geo_ray.api.tuning import TuningResult as TuningResult
    from geo_ray.api.tuning import tune as tune
    from geo_ray.config.base import StrictModel
    from geo_ray.config.experiment import Experiment as Experiment
    from geo_ray.data.files.options import ReadOptions as ReadOptions
    from geo_ray.errors import GeoRayError as GeoRayError
    from geo_ray.errors import InterruptedRunError as InterruptedRunError
    from geo_ray.lab.lab import Lab as Lab
    from geo_ray.observe.events.schema import Event as Event
    from geo_ray.observe.metrics.summary import Summary as Summary
    from geo_ray.program.batch import batched_handler as batched_handler
    from geo_ray.program.caller import gathered as gathered
    from geo_ray.program.graph import Program as Program
    from geo_ray.program.load import load_program as load_program
    from geo_ray.program.node import NodeGroup as NodeGroup
    from geo_ray.program.node import NodeHandle as NodeHandle
    from geo_ray.program.node import NodeRestarts as NodeRestarts
    from geo_ray.program.node import ProgramNode as ProgramNode
    from geo_ray.program.result import ProgramResult as ProgramResult
    from geo_ray.program.run import run_program as run_program
    from geo_ray.program.surroundings import here as here
    from geo_ray.tasks.base import Dataset as Dataset
    from geo_ray.tasks.base import Task as Task
    from geo_ray.tasks.groups import ParameterGroup as ParameterGroup
    from geo_ray.tasks.groups import undecayed as undecayed
    from geo_ray.transport.emulation.link_model import LinkSpec as LinkSpec
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
    "ClusterOffer": "api.clusters",
    "ClusterReport": "api.clusters",
    "EndedCluster": "api.clusters",
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
    "ComparisonResult": "api.comparing",
    "compare": "api.comparing",
    "DataCheck": "api.data",
    "RegionData": "api.data",
    "SourceFiles": "api.data",
    "check_data": "api.data",
    "merge_data": "api.data",
    "shard_data": "api.data",
    "export_events": "api.observe.export",
    "config_schema": "api.inputs",
    "load_config": "api.inputs",
    "LivePage": "api.observe.live",
    "follow_view": "api.observe.live",
    "watch": "api.observe.live",
    "Inventory": "api.inventory",
    "inventory": "api.inventory",
    "LossGrid": "api.loss_profile",
    "LossProfileResult": "api.loss_profile",
    "profile_loss": "api.loss_profile",
    "PlanInputs": "api.planning",
    "PlanResult": "api.planning",
    "ProfileGrid": "api.planning",
    "ProfileResult": "api.planning",
    "plan": "api.planning",
    "profile": "api.planning",
    "replan": "api.planning",
    "PriceList": "api.prices",
    "PriceRefresh": "api.prices",
    "prices": "api.prices",
    "refresh_prices": "api.prices",
    "ProbeResult": "api.probing",
    "probe": "api.probing",
    "probe_host": "api.probing",
    "serve_probes": "api.probing",
    "price_program": "api.programs.pricing",
    "run_program": "program.run",
    "TrainingNode": "api.programs.training",
    "training_program": "api.programs.training",
    "JobHints": "api.queue.jobs",
    "JobWorth": "api.queue.jobs",
    "QueueAnswer": "api.queue.jobs",
    "QueueConfig": "api.queue.serve",
    "QueueReport": "api.queue.jobs",
    "QueueUser": "api.queue.jobs",
    "WorthChange": "api.queue.jobs",
    "cancel_job": "api.queue.jobs",
    "load_queue": "api.queue.serve",
    "move_job": "api.queue.jobs",
    "names_queue": "api.queue.serve",
    "new_queue_token": "api.queue.serve",
    "queue_report": "api.queue.jobs",
    "start_queue": "api.queue.serve",
    "stop_queue": "api.queue.serve",
    "save_queue_page": "api.queue.jobs",
    "submit_job": "api.queue.jobs",
    "Run": "api.run",
    "open_run": "api.run",
    "report": "api.status",
    "RunCheck": "api.run_check",
    "check_run": "api.run_check",
    "checkpoints": "api.status",
    "ScheduleResult": "api.scheduling",
    "schedule": "api.scheduling",
    "init_project": "api.starters",
    "RunStatus": "api.status",
    "change_members": "api.status",
    "follow_status": "api.status",
    "members": "api.status",
    "status": "api.status",
    "simulate": "api.training",
    "stop": "api.status",
    "train": "api.training",
    "Table": "api.tables",
    "TuningResult": "api.tuning",
    "tune": "api.tuning",
    "Options": "config.base:StrictModel",
    "Experiment": "config.experiment",
    "ReadOptions": "data.files.options",
    "GeoRayError": "errors",
    "InterruptedRunError": "errors",
    "Lab": "lab.lab",
    "ProbeAddress": "transport.probe.hosts",
    "ProbeSide": "transport.probe.hosts",
    "ProbePlan": "transport.probe.plan",
    "Event": "observe.events.schema",
    "Summary": "observe.metrics.summary",
    "batched_handler": "program.batch",
    "gathered": "program.caller",
    "Program": "program.graph",
    "load_program": "program.load",
    "NodeGroup": "program.node",
    "NodeHandle": "program.node",
    "NodeRestarts": "program.node",
    "ProgramNode": "program.node",
    "ProgramResult": "program.result",
    "here": "program.surroundings",
    "LinkSpec": "transport.emulation.link_model",
    "Dataset": "tasks.base",
    "Task": "tasks.base",
    "ParameterGroup": "tasks.groups",
    "undecayed": "tasks.groups",
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
