"""Memory of all processes of a run of two regions with a model of 125 M parameters.

DiLoCo over AdamW, without checkpoints. Ray's processes, the command and the loops count. Sizes are
in multiples of one fp32 model.

  train           ``geo-ray train`` with one worker per region, `train.optimizer_on: server`
  worker          the same with `train.optimizer_on: worker`
  groups          ``geo-ray train`` with regions that are process groups of one rank
  serve           ``geo-ray serve`` with two plain loops
  alone           the same with a server that is a process without Ray

  CASE            peak of all processes together
  CASE: KIND (N)  part of that peak of the N processes of a kind
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import geo_ray
from benchmarks.common import support
from benchmarks.common.command import GEO_RAY
from benchmarks.common.memory import MemoryPeak, memory_peak
from benchmarks.joining.step_time import CONTEXT, SIZES, Gpt, step
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import Stage
from geo_ray.transport.security.certs import Authority

STEPS, INTERVAL = 4, 2
TRAIN = f"""
name: memory
task:
  use: bytelm
  options: {{size: 50M, dim: 768, layers: 18, heads: 12, context: 32, max_bytes: 50_000}}
data: {{generate: {{rows_per_shard: 1024}}, batch_size: 2}}
regions: [{{name: eu}}, {{name: us}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
optimizer: {{kind: adamw, lr: 1.0e-4}}
train: {{steps: {STEPS}, eval_every: 0}}
checkpoint: {{every_s: null}}
"""
GROUPS = TRAIN.replace(
    "regions: [{name: eu}, {name: us}]",
    "regions: [{name: eu, group: {cpus_per_rank: 1}}, {name: us, group: {cpus_per_rank: 1}}]",
)
SERVE = f"""
name: memory
regions: [{{name: eu, join: true}}, {{name: us, join: true}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
train: {{steps: {STEPS}}}
checkpoint: {{every_s: null}}
serve: {{host: 127.0.0.1, port: 0}}
"""
_MODEL = 4e6  # bytes of a model of a million parameters
_KINDS = {
    "--loop": "loop",
    "--server": "server without Ray",
    "geo_ray.cli.main": "command",
    "process_supervisor": "cluster's supervisor",
    "ray": "Ray",
}
"""Kinds of processes that are no actors, by a word of their command; the first one counts."""


def main() -> None:
    """Measure both kinds of runs; with ``--loop``, be a loop."""
    parser = support.parser(__doc__)
    parser.add_argument("--loop", nargs=3, metavar=("ADDRESS", "REGION", "PEM"))
    parser.add_argument("--server", type=Path, metavar="FOLDER")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    options = parser.parse_args()
    if options.server:
        serve_alone(options.server)
        return
    if options.loop:
        loop(*options.loop)
        return
    machine, figures = support.hardware(), []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            peak, millions = CASES[case](Path(folder))
        model_bytes = millions * _MODEL
        support.say(f"{case}: {millions:.1f} M parameters")
        figures.append(support.Figure(case, peak.bytes / model_bytes, "models"))
        for kind, sizes in by_kind(peak.by_process.values()).items():
            part = sum(sizes) / model_bytes
            figures.append(
                support.Figure(f"{case}: {kind} ({len(sizes)})", part, "models", runs=sizes)
            )
    support.finish("joining.all_memory", machine, figures, options.out)


def kind_of(command: str) -> str:
    """Return the kind of a process, given its command line."""
    if command.startswith("ray::"):
        return command.removeprefix("ray::").partition(".")[0].split()[0]
    for word, kind in _KINDS.items():
        if word in command:
            return kind
    return "other"


def by_kind(processes: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the sizes of processes by kind, the largest kind first."""
    found: dict[str, list[int]] = {}
    for size, command in processes:
        found.setdefault(kind_of(command), []).append(size)
    return dict(sorted(found.items(), key=lambda each: -sum(each[1])))


def train(folder: Path) -> tuple[MemoryPeak, float]:
    """Return the peak of a run whose servers have the optimizer, and its millions of parameters."""
    return _driven(folder, TRAIN, "--set", "train.optimizer_on=server")


def worker(folder: Path) -> tuple[MemoryPeak, float]:
    """The same of a run whose workers have the optimizer."""
    return _driven(folder, TRAIN, "--set", "train.optimizer_on=worker")


def groups(folder: Path) -> tuple[MemoryPeak, float]:
    """The same of a run whose regions are process groups."""
    return _driven(folder, GROUPS)


def _driven(folder: Path, content: str, *flags: str) -> tuple[MemoryPeak, float]:
    (folder / "train.yaml").write_text(content, "utf-8")
    with memory_peak() as peak:
        if _run(folder, "train", "train.yaml", *flags).wait():
            raise RuntimeError("the run failed")
    run = geo_ray.open_run(folder / "runs" / "memory")
    sizes = [e["bytes_before"] for e in run.events() if e.kind == "exchange"]
    return peak, sizes[0] / _MODEL


def serve(folder: Path) -> tuple[MemoryPeak, float]:
    """Return the peak of a served run and of its loops, and its millions of parameters."""
    (folder / "serve.yaml").write_text(SERVE, "utf-8")
    with memory_peak() as peak:
        server = _run(folder, "serve", "serve.yaml")
        _train_in(server, folder / "runs" / "memory" / "join")
    return peak, _gpt_millions()


def alone(folder: Path) -> tuple[MemoryPeak, float]:
    """Return the peak of a server and of its loops, and their millions of parameters."""
    words = ["-m", "benchmarks.joining.all_memory", "--out", os.devnull, "--server", str(folder)]
    with memory_peak() as peak:
        _train_in(subprocess.Popen([sys.executable, *words], cwd=support.REPOSITORY), folder)
    return peak, _gpt_millions()


def serve_alone(folder: Path) -> None:
    """Serve a run without Ray until it ends; write credentials and address to a folder."""
    torch.set_num_threads(1)
    authority, key = Authority.create("memory"), secrets.token_bytes(32)
    for name in ("eu", "us", SERVER):
        JoinCredentials(name, "run", key, authority.issue(name)).write(folder / f"{name}.pem")
    values = {
        "name": "memory",
        "regions": ["eu", "us"],
        "steps": STEPS,
        "strategy": {"kind": "diloco", "interval": INTERVAL},
    }
    terms = JoinTerms.model_validate_json(json.dumps(values))
    server = JoinServer(terms, JoinCredentials.read(folder / f"{SERVER}.pem"))
    (folder / "address").write_text("geo-ray://{}:{}\n".format(*server.address), "ascii")
    while server.stage is not Stage.DONE:
        time.sleep(0.1)
    server.close()


def _gpt_millions() -> float:
    return sum(p.numel() for p in Gpt(*SIZES["125M"]).parameters()) / 1e6


def _train_in(server: subprocess.Popen[bytes], folder: Path) -> None:
    """Start the loops of a server, and wait for its end."""
    path = folder / "address"
    while not (path.exists() and path.read_text("ascii").endswith("\n")):
        if server.poll() is not None:
            raise RuntimeError("the run could not be served")
        time.sleep(0.1)
    address = path.read_text("ascii").strip()
    words = ["-m", "benchmarks.joining.all_memory", "--out", os.devnull, "--loop", address]
    for name in ("eu", "us"):
        subprocess.Popen(
            [sys.executable, *words, name, str(folder / f"{name}.pem")],
            cwd=support.REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if server.wait():
        raise RuntimeError("the run failed")


def _run(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*GEO_RAY, *words, "--plain"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def loop(address: str, region: str, credentials: str) -> None:
    """Train in the run until it ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(*SIZES["125M"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, SIZES["125M"][2], (2, CONTEXT))
    with (
        geo_ray.join(address, region=region, credentials=credentials) as site,
        site.training(model) as sync,
    ):
        while not sync.done:
            loss = step(model, optimizer, tokens)
            optimizer.zero_grad()
            sync.step(rows=len(tokens), loss=loss)


CASES = {"train": train, "worker": worker, "groups": groups, "serve": serve, "alone": alone}


if __name__ == "__main__":
    main()
