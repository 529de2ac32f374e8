"""The reference pages that are generated from code.

``python -m geo_ray.testing.reference_pages docs/reference/generated`` writes all of them; tests
hold the files against `pages`. The site itself renders the page of the command line from the
commands, and the entries of the page of the Python API from the docstrings.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import geo_ray
from geo_ray.base.describe import default_text, type_and_limits
from geo_ray.base.errors import ConfigError, GeoRayError, InterruptedRunError, every_class
from geo_ray.base.model import Place, alternatives, every_field
from geo_ray.base.states import StateTable
from geo_ray.cloud.autoscaler.state import INSTANCE
from geo_ray.data.prepare.config import Preparation
from geo_ray.experiment.experiment import Experiment
from geo_ray.lab.topology import Topology
from geo_ray.prices.price_book import PriceBook
from geo_ray.runtime.actor import ACTOR
from geo_ray.runtime.regions import REGION
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.state import JOB
from geo_ray.sweep.search_config import TuningConfig
from geo_ray.telemetry.events import EVENT_FIELDS, OPTIONAL_FIELDS
from geo_ray.telemetry.metrics import METRICS
from geo_ray.telemetry.summary import Summary

_WRITTEN: Final = "<!-- Written by geo_ray/testing/reference_pages.py. -->"

FIELDS: Final[Mapping[str, str]] = {
    "region": "the region that the event is about",
    "step": "local step of the region, from 1",
    "worker": "the worker: its index, or its name",
    "attempt": "1 for the first process of this worker, one more for each replacement",
    "cause": "why, in words",
    "took_s": "seconds since the request",
    "round": "the round, from 1; `null` if the strategy has none",
    "metrics": "value of each metric of the task",
    "regions": "names of the regions that take part",
    "before": "the value before the change",
    "gain": "estimated saving, as a fraction of the rest of the run",
    "interval": "steps between exchanges",
    "averager": "the averager's region",
    "samples": "rows",
}
"""Meaning of fields that several events have; an event of `EVENTS` may state another one."""

EVENTS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "run_started": (
        "Training begins or resumes.",
        {
            "run": "name of the run",
            "digest": "digest of the configuration",
            "strategy": "kind of the strategy",
            "task": "name of the task",
            "seed": "seed of the run",
            "simulated": "true for `geo-ray simulate`; times are then virtual",
            "averager": "the averager's region at the start",
            "address": "where the run is served to regions that join",
            "steps": "steps to apply, by region",
            "links": "the kind of links in words: emulated, simulated or real",
            "codec": "codec of each direction, `up` and `down`; `null`: none",
            "startup_s": "seconds from the command to the start of training",
            "resumed_step": "largest step of a region in the checkpoint; only if resumed",
            "cause": "why a resumed run started new processes instead of keeping the old ones",
            "tokens_per_row": "tokens of a row, if the task states them",
            "flops_per_row": "floating-point operations of forward and backward pass over a row",
            "flops_estimated": "true if `flops_per_row` is estimated from the parameters",
            "ranks": "processes of each region that is a process group",
            "pid": "process id of the averager, for regions that join",
            "holders": "addresses of further processes that hold parts of the model, for regions "
            "that join",
        },
    ),
    "step": (
        "A region applied a step.",
        {
            "samples": "rows of this step",
            "loss": "mean training loss over these rows",
            "compute_s": "seconds of computing",
            "wait_s": "seconds of waiting",
            "start_s": "when computing began",
            "learning_rate": "of the inner optimizer's newest step; null: it made none",
            "steps": "where regions join or are groups: steps since the region's last exchange",
            "exchange_s": "where regions join or are groups: seconds of the region's exchange "
            "before, without waiting for other regions; 0: not measured",
        },
    ),
    "exchange": (
        "A region merged the answer to an update.",
        {
            "seq": "number of the region's update, from 1",
            "start_s": "when the update was sent",
            "bytes_sent": "payload sent, encoded",
            "bytes_received": "payload received, encoded",
            "bytes_before": "payload that each direction would have without a codec",
            "blocking": "whether training waited for the answer",
            "staleness": "updates of other regions that the averager applied since the "
            "parameters that this update was computed from",
            "held_s": "seconds that the averager held the update while it waited for others",
        },
    ),
    "update_dropped": (
        "An update was given up before the averager applied it. The next update includes it.",
        {"seq": "number of the region's update", "bytes_sent": "payload sent"},
    ),
    "eval": (
        "Held-out rows were evaluated.",
        {
            "region": "the region; `null` for the rows of all regions",
            "final": "whether this is the evaluation of the finished model",
        },
    ),
    "best_kept": (
        "The evaluated model is the best so far and was stored. A resumed run repeats the event.",
        {
            "region": "the region whose model it is; `null` if all regions evaluated the same one",
            "metric": "the metric that decides",
            "mode": "`min` or `max`",
            "value": "value of that metric",
        },
    ),
    "best_failed": (
        "The evaluated model is the best so far and could not be stored. The best model before it "
        "stays.",
        {},
    ),
    "checkpoint": (
        "A checkpoint was committed. A simulation writes none.",
        {"id": "its number", "bytes": "its size", "step": "largest step of a region in it"},
    ),
    "checkpoint_failed": (
        "A checkpoint could not be written. The one before it stays; the next is due at its usual "
        "time.",
        {},
    ),
    "worker_lost": ("A worker died.", {}),
    "worker_requested": ("The run actor requested a replacement for a worker.", {}),
    "worker_started": ("The replacement's process runs.", {}),
    "worker_replaced": ("The replacement works: its server has given it rows.", {}),
    "process_unresponsive": (
        "A process is unresponsive: a worker's step takes far too long, or a server or bridge "
        "does not answer.",
        {"process": "name of the process", "unresponsive_s": "seconds without an answer"},
    ),
    "worker_left": (
        "A worker was asked to leave, because its node is being drained. Its work counts.",
        {},
    ),
    "active_workers": (
        "The set of active workers of a region changed. Only where a step does not wait for all.",
        {
            "step": "last step before the change",
            "workers": "active workers",
            "rows": "their rows per step",
        },
    ),
    "step_refused": ("A step had a value that is not finite. Parameters are unchanged.", {}),
    "state_changed": (
        "Model state changed in a way that the task did not declare. The run continues.",
        {
            "how": "`changed`: state that is neither trained nor a declared model buffer changed; "
            "`unfrozen` or `frozen`: `requires_grad` changed after the start, which does not "
            "change what is trained",
            "names": "names of the tensors",
        },
    ),
    "device": (
        "The GPU of a worker, and its memory: after the first step, and when its peak grows.",
        {
            "device": "name of the GPU",
            "share": "fraction of the GPU that the worker has",
            "peak_bytes": "largest memory that PyTorch allocated",
            "total_bytes": "memory of the GPU",
        },
    ),
    "noise": (
        "The gradient noise was measured, at every 16th step.",
        {
            "region": "the region; `null` for all regions together",
            "grad_sq": "smoothed estimate of the squared norm of the true gradient",
            "trace": "smoothed estimate of the trace of the gradient's covariance per row",
            "rows": "rows of this step",
            "workers": "gradients that were compared",
            "count": "measurements that the estimates are smoothed over",
        },
    ),
    "region_lost": ("A region is lost, and the run continues without it.", {}),
    "run_paused": ("Too few regions are present: training is paused.", {}),
    "run_resumed": ("Enough regions are present again: training continues.", {}),
    "bridge_requested": ("A region's bridge died, and a replacement is being started.", {}),
    "bridge_replaced": (
        "The replacement of a region's bridge works. Nothing was lost.",
        {"took_s": "seconds since the loss was noticed"},
    ),
    "run_actor_attached": (
        "A new run actor took over the running processes of a run.",
        {
            "token": "fencing token: number of holders of the run's lease so far",
            "downtime_s": "seconds in which no event was written",
        },
    ),
    "region_drained": (
        "A region left after it had exchanged all its work.",
        {
            "cause": "`asked` (requested by a user) or `notice` (its machine is being terminated; "
            "the region returns later)"
        },
    ),
    "members_accepted": (
        "A requested change of membership begins.",
        {"verb": "the change, such as `add` or `drain`", "request": "name of the request's file"},
    ),
    "members_refused": (
        "A requested change of membership was rejected.",
        {"verb": "the change", "request": "name of the request's file"},
    ),
    "region_joining": ("The processes of a joining or returning region are being started.", {}),
    "region_started": (
        "These processes run. The region joins at the next membership barrier.",
        {},
    ),
    "join_failed": ("A region could not join. The run continues as before.", {}),
    "region_joined": (
        "A region takes part from now on.",
        {
            "view": "number of the membership view that includes it",
            "round": "last round before it",
            "step": "step of the region whose state was copied",
            "bytes": "size of that state",
            "took_s": "seconds from the copy until the region trains",
        },
    ),
    "replanned": (
        "Membership changed in a run that follows a plan: the best plan for the present regions.",
        {
            "changed": "whether it differs from the plan in use and pays for the change",
            "seconds": "estimated time of the rest of the run",
            "usd": "estimated cost of the rest of the run",
        },
    ),
    "interval_changed": (
        "A run that follows a plan changed its interval, because membership changed.",
        {},
    ),
    "averager_moves": (
        "A run that follows a plan moves its averager, because membership changed. "
        "`averager_moved` reports the end of the move.",
        {},
    ),
    "region_left": (
        "The averager no longer waits for a region. Its further data are missing.",
        {"region": "the averager's region", "name": "the region that left"},
    ),
    "averager_moved": (
        "The averager runs in another region now.",
        {"region": "the averager's region", "term": "leader term"},
    ),
    "standby_ready": (
        "The averager has a hot standby again.",
        {"region": "the averager's region", "name": "the standby's region", "term": "leader term"},
    ),
    "server_replaced": (
        "The standby serves the run that regions join; the process that did was lost.",
        {
            "address": "where the run is served now",
            "term": "number of the server",
            "took_s": "seconds from the loss being noticed",
            "cause": "why the other process is lost",
            "pid": "its process id",
        },
    ),
    "server_standby_ready": (
        "The process that serves a run has a standby, which has its state.",
        {
            "address": "where the standby would serve the run",
            "term": "number of the server",
            "pid": "its process id",
        },
    ),
    "server_standby_lost": (
        "The standby was lost or could not keep up. The run continues, and starts another one.",
        {"address": "where it would have served the run"},
    ),
    "stop_requested": (
        "The run was asked to stop: by a user, a signal or an evaluation.",
        {"reason": "of an evaluation: target (reached) or patience (no improvement)"},
    ),
    "wan": (
        "Traffic between two regions since the last `run_started`. Written at intervals, and at "
        "the end.",
        {
            "src": "sending region",
            "dst": "receiving region",
            "bytes_by_class": "bytes by message class",
        },
    ),
    "run_finished": ("The run finished.", {"summary": "the content of `summary.json`"}),
    "run_failed": (
        "An error ended the run, or a user stopped it (`INTERRUPTED`).",
        {
            "code": "code of the [error](errors.md); `INVARIANT` for errors of other software",
            "message": "its message",
            "fix": "how to correct it",
        },
    ),
}
"""For each kind of event: when it is written, and the meaning of its fields."""

_EVENTS_HEAD: Final = """\
# Events

A run writes `events.jsonl` in its directory, one JSON object per line:
`{"t_s": ..., "kind": ..., ...}`. `t_s` is in seconds since the run began, and virtual in a
simulation. A resumed run appends to the same file and continues the time.

- Every field below is present, except those marked *optional*.
- A number that is not finite is `null`.
- Readers ignore further fields and further kinds: a newer version may write them.
- Every event is handed to the operating system in one write before the run continues. A crash of a
  process loses no event; a crash of the machine may lose the newest ones. Readers ignore an
  incomplete last line, and a resumed run removes it.
- A log without `run_finished` or `run_failed` after its last `run_started` belongs to a run that is
  active or was killed. An active run holds a shared `flock` on the file.

[Watch a run](../../operations/monitoring.md) shows how to read and follow the log.
"""

_TYPES: Final[Mapping[str, str]] = {
    "_text": "string",
    "_flag": "boolean",
    "_whole": "integer",
    "_number": "number",
    "_finite_number": "number",
    "_mode": "string",
    "_name": "string or integer",
    "_texts": "list of strings",
    "checked": "object",
    "finite": "any",
}


def _events() -> str:
    parts = [_WRITTEN, "", _EVENTS_HEAD]
    for kind, fields in EVENT_FIELDS.items():
        when, meanings = EVENTS[kind]
        optional = {n: c for n, c in OPTIONAL_FIELDS.get(kind, {}).items() if n not in fields}
        listed = [*fields, *optional, *(n for n in meanings if n not in {**fields, **optional})]
        parts += [f"## {kind}", "", when, ""]
        if listed:
            parts += ["| field | meaning |", "|---|---|"]
        for name in listed:
            text = meanings.get(name) or FIELDS[name]
            parts.append(f"| `{name}` | {'' if name in fields else '*optional*; '}{text} |")
        parts += [""] if listed else []
    return "\n".join(parts)


_CONFIGURATIONS: Final[Mapping[str, tuple[str, type[BaseModel]]]] = {
    "Run": ("geo-ray train", Experiment),
    "Queue": ("geo-ray queue", QueueConfig),
    "Search": ("geo-ray tune", TuningConfig),
    "Data preparation": ("geo-ray data shard", Preparation),
    "WAN lab": ("geo-ray lab up", Topology),
    "Prices": ("geo-ray prices", PriceBook),
}

_CONFIGURATION_HEAD: Final = """\
# Configuration

Every key of every configuration file, with its type, default and meaning. Files are YAML. Unknown
keys are rejected. `--set train.steps=100` changes one key on the command line, and
`geo-ray config schema KEY` prints the same descriptions in the terminal.
"""


def _configuration() -> str:
    parts = [_WRITTEN, "", _CONFIGURATION_HEAD]
    for title, (command, model) in _CONFIGURATIONS.items():
        parts += [f"## {title}", "", f"The file of `{command}`.", ""]
        parts += _sections(model)
    return "\n".join(parts)


def _sections(model: type[BaseModel]) -> Iterator[str]:
    tables: dict[str, list[str]] = {}
    meanings: dict[str, str] = {}
    for path, info in every_field(model):
        head, _, name = path.rpartition(".")
        meaning = " ".join((info.description or _summary(info)).split())
        meanings[path] = meaning
        kind = type_and_limits(info)
        row = f"| `{name}` | {_cell(kind)} | {_cell(default_text(info))} | {_cell(meaning)} |"
        tables.setdefault(head, []).append(row)
    for head, rows in tables.items():
        name = head or "Top level"
        yield f"{'###' if '.' not in head else '####'} {_heading(name)}"
        yield ""
        if meanings.get(head):
            yield f"{meanings[head][:1].upper()}{meanings[head][1:]}."
            yield ""
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""


def _summary(info: FieldInfo) -> str:
    """The first line of a section's docstring, as a description; "" if it has several kinds."""
    options = [each.model for each in alternatives(Place.of(info)) if each.model is not None]
    if len(options) != 1 or not options[0].__doc__:
        return ""
    line = str(options[0].__doc__).strip().splitlines()[0].rstrip(".")
    return f"{line[0].lower()}{line[1:]}"


def _heading(path: str) -> str:
    return path if path == "Top level" else f"`{path}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


_WIDTH: Final = 118
_GAP: Final = "\0"  # stands for a space inside a code span, where no line may end

EXAMPLE: Final = ConfigError(
    "job.yaml: 2 problems:\n"
    '    train.steps (line 6): got "many", expected a whole number from 1 to 1000000000000\n'
    "    train.eval_evry (line 7): unknown key; did you mean eval_every?",
    fix="Correct all of them. `geo-ray config schema train` shows the valid keys and values.",
)
"""What `geo-ray train` says of a file with two mistakes; a test makes the mistakes."""


def errors_page() -> str:
    """Give the page of errors, from the error classes."""
    roots = sorted(GeoRayError.__subclasses__(), key=attrgetter("exit_code"))
    parts = [_errors_head(roots), _error_section(GeoRayError)]
    for root in roots:
        below = [kind for kind in every_class() if issubclass(kind, root)]
        parts += [f"## {root.chapter}", *(_error_section(kind) for kind in below)]
    return "\n\n".join(parts) + "\n"


def _errors_head(roots: list[type[GeoRayError]]) -> str:
    form = str(GeoRayError("what went wrong, naming the key, shard, region or file", fix="FIX"))
    form = form.replace(f"[{GeoRayError.code}]", "[CODE]").replace("FIX", "what to do about it")
    chapters = "; ".join(f"{kind.exit_code} {kind.chapter}" for kind in roots)
    return "\n\n".join(
        [
            _WRITTEN,
            "# Errors",
            _filled(
                "Every error of geo_ray has a stable code, a process exit code and a remedy. The "
                "command line prints it to standard error as"
            ),
            _block(f"error {form}"),
            _filled(
                "and the process ends with the exit code of its section below. Several problems "
                "of one kind come together, a line for each:"
            ),
            _block(f"error {EXAMPLE}"),
            _filled("Codes do not change between releases; messages may."),
            _filled(
                f"Exit codes by chapter: {chapters}. A run that was stopped ends with "
                f"{InterruptedRunError.exit_code}, a command line with a wrong option with 2; 0 "
                "is success."
            ),
            _filled(
                "A *family* is the parent of other codes: code that catches errors may catch a "
                "whole family by its class in `geo_ray.base.errors`, and a person rarely sees its "
                "code."
            ),
        ]
    )


def _error_section(kind: type[GeoRayError]) -> str:
    family = ", a *family*" if kind.__subclasses__() else ""
    more = vars(kind).get("more", "")
    return "\n\n".join(
        [
            f"### {kind.code}",
            f"Exit code: {kind.exit_code}. Class: `{kind.__name__}`{family}.",
            _filled(f"**Meaning.** {_meaning(kind)}"),
            _filled(f"**Causes.** {kind.causes}"),
            _filled(f"**Fix.** {kind.advice} {more}"),
        ]
    )


def _meaning(kind: type[GeoRayError]) -> str:
    """The docstring without its lists."""
    return inspect.cleandoc(vars(kind)["__doc__"]).partition("\n\nArgs:")[0]


def _block(text: str) -> str:
    return textwrap.indent(text, "    ")


def _unbroken(span: re.Match[str]) -> str:
    return span[0].replace(" ", _GAP)


def _filled(text: str) -> str:
    """The text as lines; no line ends inside a code span, so that commands stay whole."""
    text = re.sub(r"`[^`]+`", _unbroken, " ".join(text.split()))
    lines = textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_GAP, " ")


TABLES: Final[tuple[tuple[StateTable[Any, Any], str], ...]] = (
    (REGION, "geo_ray/runtime/regions.py"),
    (ACTOR, "geo_ray/runtime/actor.py"),
    (INSTANCE, "geo_ray/cloud/autoscaler/state.py"),
    (JOB, "geo_ray/scheduler/queue/state.py"),
)
"""Every state machine, and the file that declares it."""

_STATES_HEAD: Final = """\
# States

Objects with a life cycle have one state, an enum, and change it by one transition function. The
diagrams below are generated from the tables that the code runs. An event that a table does not list
for a state is a programming error.
"""


def _states() -> str:
    return "\n".join(
        [_WRITTEN, "", _STATES_HEAD, *(_state_section(table, file) for table, file in TABLES)]
    )


def _state_section(table: StateTable[Any, Any], file: str) -> str:
    rows = "\n".join(f"| `{state.value}` | {text} |" for state, text in table.states.items())
    return (
        f"## {table.name}\n\nDeclared in `{file}`.\n\n| State | Meaning |\n| --- | --- |\n"
        f"{rows}\n\n```mermaid\n{table.mermaid()}\n```\n"
    )


_PYTHON_HEAD: Final = """\
# Python API

The public names of `geo_ray`. [Train from Python](../../guides/python.md) shows how to use them.
On the documentation site, this page has the signature and description of each name.
"""


_MODULES_HEAD: Final = """\
`help(geo_ray.api.certs)` shows signatures and results, and likewise for the others.

| module | names | command |
|---|---|---|"""
MODULES: Final[tuple[tuple[str, str, str], ...]] = (
    # module, its public names, the commands that do the same
    ("geo_ray.api.config", "init_project config_schema", "geo-ray init, geo-ray config"),
    (
        "geo_ray.api.check",
        "check check_run PromiseCheck RunCheck",
        "geo-ray check, geo-ray train --dry-run, geo-ray serve --dry-run",
    ),
    (
        "geo_ray.api.data",
        "inspect_data data_stats merge_data_stats check_data merge_data SourceFiles "
        "WantedStatistics RegionData DataCheck DataSurvey DataStatistics",
        "geo-ray data",
    ),
    ("geo_ray.api.status", "follow_status change_members", "geo-ray status, geo-ray members"),
    ("geo_ray.api.live", "follow_view export_events LivePage", "geo-ray watch, geo-ray events"),
    (
        "geo_ray.api.plan",
        "replan PlanInputs ProfileGrid PlanResult ProfileResult",
        "geo-ray plan, geo-ray profile",
    ),
    (
        "geo_ray.api.compare",
        "profile_loss LossGrid ComparisonResult LossProfileResult",
        "geo-ray compare, geo-ray profile --loss",
    ),
    ("geo_ray.api.tune", "TuningResult", "geo-ray tune"),
    ("geo_ray.api.prices", "prices refresh_prices PriceList PriceRefresh", "geo-ray prices"),
    ("geo_ray.api.probe", "probe probe_host serve_probes ProbeResult", "geo-ray probe"),
    (
        "geo_ray.api.certs",
        "init_certs issue_cert certs renew_certs renew_ca revoke_cert rotate_ca CertificateList",
        "geo-ray certs",
    ),
    (
        "geo_ray.api.clusters",
        "up_offer cluster_status inventory UpCluster Inventory",
        "geo-ray up --dry-run, geo-ray status, geo-ray inventory",
    ),
    (
        "geo_ray.api.queue",
        "start_queue stop_queue submit_job cancel_job move_job queue_report save_queue_page "
        "load_queue names_queue new_queue_token QueueUser QueueAnswer",
        "geo-ray queue",
    ),
    ("geo_ray.api.schedule", "schedule ScheduleResult", "geo-ray schedule"),
    ("geo_ray.api.program", "training_program price_program TrainingNode", "geo-ray program"),
    ("geo_ray.api.display", "Table", ""),
    ("geo_ray.data.tasks.groups", "ParameterGroup undecayed", ""),
    ("geo_ray.data.packing", "pack pack_stream write_packed packed_types PackedRows IGNORE", ""),
    ("geo_ray.data.files.options", "ReadOptions", ""),
    (
        "geo_ray.program.graph",
        "Program ProgramNode NodeGroup NodeHandle NodeRestarts load_program",
        "",
    ),
    ("geo_ray.program.run", "run_program", "geo-ray program"),
    ("geo_ray.program.calls", "batched_handler gathered", ""),
    ("geo_ray.program.clock", "here", ""),
    ("geo_ray.program.result", "ProgramResult", ""),
    ("geo_ray.transport.emulation", "LinkSpec", ""),
    ("geo_ray.transport.probe.hosts", "ProbeAddress ProbeSide", ""),
    ("geo_ray.transport.probe.plan", "ProbePlan", ""),
    ("geo_ray.lab.lab", "Lab", "geo-ray lab"),
    ("geo_ray.scheduler.queue.config", "QueueConfig", ""),
    ("geo_ray.scheduler.queue.job_spec", "JobHints JobValue ValueChange", ""),
    ("geo_ray.scheduler.queue.report", "QueueReport", ""),
    ("geo_ray.cloud.cluster.offer", "ClusterOffer", ""),
    ("geo_ray.cloud.cluster.status", "ClusterReport", ""),
    ("geo_ray.cloud.cluster.down", "EndedCluster", ""),
    ("geo_ray.telemetry.status", "RunStatus", ""),
    ("geo_ray.telemetry.summary", "Summary", ""),
    ("geo_ray.base.errors", "InterruptedRunError", ""),
)
"""Public modules and their names that `geo_ray` does not export."""


def _python() -> str:
    parts = [_WRITTEN, "", _PYTHON_HEAD]
    for name in sorted(set(geo_ray.__all__) - {"__version__"}, key=str.lower):
        found = getattr(geo_ray, name)
        where = f"{found.__module__}.{found.__qualname__}"
        parts += [f"## geo_ray.{name}", "", f"::: {where}", ""]
    parts += ["## Other public modules", "", _MODULES_HEAD]
    for module, names, commands in MODULES:
        quoted = ", ".join(f"`{name}`" for name in names.split())
        same = ", ".join(f"`{command}`" for command in commands.split(", ") if command)
        parts.append(f"| `{module}` | {quoted} | {same} |")
    parts.append("")
    return "\n".join(parts)


_OUTPUTS_HEAD: Final = """\
# Summary and metrics

The content of `summary.json`, and the metrics that a run exports through Ray. [Watch a
run](../../operations/monitoring.md) and [Export metrics](../../operations/dashboards.md) show how
to read them.
"""


def _outputs() -> str:
    parts = [_WRITTEN, "", _OUTPUTS_HEAD, "## Summary", "", "| key | meaning |", "|---|---|"]
    parts += [f"| `{name}` | {key.description} |" for name, key in Summary.model_fields.items()]
    parts += ["", "## Metrics", "", "Ray adds the prefix `ray_` and, to counters, `_total`.", ""]
    parts += ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{key}`" for key in spec.tag_keys)
        parts.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.description} |")
    return "\n".join([*parts, ""])


def pages() -> dict[str, str]:
    """Give the text of each generated page by its file name."""
    return {
        "configuration.md": _configuration(),
        "errors.md": errors_page(),
        "events.md": _events(),
        "outputs.md": _outputs(),
        "python.md": _python(),
        "states.md": _states(),
    }


def main(folder: Path) -> Any:
    """Write all pages into ``folder``."""
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
