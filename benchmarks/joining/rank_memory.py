"""Peak memory of a rank that joins a run, over what training in rounds needs at least.

A process of its own trains the GPT of `benchmarks.joining.step_time` with AdamW on the CPU, as the
only rank of the only region. The serving process is another one. The baseline is the resident size
of the rank after it has imported everything and made a step of a tiny model; peaks are the kernel's
(VmHWM, reset before each phase).

  ratio  growth of the peak over parameters, gradients, two moments and the anchor, and for an
         overlapping strategy one snapshot and one reply more, all fp32; with the gradients freed
         before `sync.step` (``zero_grad``), and with gradients that stay
  plain  growth of the peak of the same loop before it joins, in models: four, and activations
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import support
from benchmarks.joining.step_time import CONTEXT, SIZES, Gpt, resident_bytes, step
from geo_ray.base.memory import give_back_memory
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.joining.site import join
from geo_ray.transport.security.certs import Authority

NEEDED = {"diloco": 5, "one_step_delay": 7}
"""Models that a rank holds at least, by strategy."""

INTERVAL, ROUNDS = 2, 6
_REGION = "here"


def main() -> None:
    """Measure all cases; with ``--rank``, be the rank."""
    parser = support.parser(__doc__)
    parser.add_argument("--rank", nargs=3, metavar=("ADDRESS", "PEM", "SIZE"))
    parser.add_argument("--held", action="store_true", help="show who holds what at the peak")
    options = parser.parse_args()
    if options.rank:
        options.out.write_text(json.dumps(be_rank(*options.rank, held=options.held)), "utf-8")
        return
    machine, figures = support.hardware(), []
    for size in ("10M",) if options.quick else tuple(SIZES):
        for kind, needed in NEEDED.items():
            runs = [measure(size, kind, options) for _ in range(1 if options.quick else 2)]
            model_bytes = 4 * runs[0]["parameters"]
            of = f"{kind}, {size}"
            stay = [run["joined_stay"] / model_bytes / needed for run in runs]
            ratios = [run["joined"] / model_bytes / needed for run in runs]
            plain = [run["plain"] / model_bytes for run in runs]
            between = [run["between"] / model_bytes for run in runs]
            figures += [
                support.median(f"ratio, {of}", ratios, "ratio", "<= 1.15"),
                support.median(f"ratio, gradients stay, {of}", stay, "ratio"),
                support.median(f"plain, {of}", plain, "models"),
                support.median(f"held between exchanges, {of}", between, "models"),
            ]
    support.finish("joining.rank_memory", machine, figures, options.out)


def measure(size: str, kind: str, options: argparse.Namespace) -> dict[str, int]:
    """Serve a run to one rank in another process; return what it measured."""
    with tempfile.TemporaryDirectory() as text:
        folder, authority, key = Path(text), Authority.create("benchmark"), secrets.token_bytes(32)
        for each in (_REGION, SERVER):
            JoinCredentials(each, "run", key, authority.issue(each)).write(folder / f"{each}.pem")
        values = {
            "name": "benchmark",
            "regions": [_REGION],
            "steps": INTERVAL * ROUNDS,
            "strategy": {"kind": kind, "interval": INTERVAL},
        }
        terms = JoinTerms.model_validate_json(json.dumps(values))
        server = JoinServer(terms, JoinCredentials.read(folder / f"{SERVER}.pem"))
        address = "geo-ray://{}:{}".format(*server.address)
        words = [*("--rank", address, str(folder / f"{_REGION}.pem"), size)]
        words += ["--out", str(folder / "found.json"), *(["--held"] if options.held else [])]
        command = [sys.executable, "-m", "benchmarks.joining.rank_memory", *words]
        subprocess.run(command, check=True, cwd=support.REPOSITORY)
        server.close()
        found: dict[str, int] = json.loads((folder / "found.json").read_text("utf-8"))
    models = {k: v / 4 / found["parameters"] for k, v in found.items() if k != "parameters"}
    support.say(f"{kind}, {size}: {', '.join(f'{k} {v:.2f}' for k, v in models.items())} models")
    return found


def be_rank(address: str, credentials: str, size: str, *, held: bool) -> dict[str, int]:
    """Train in the run; return the growth of the resident size by phase."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, CONTEXT))
    tiny = Gpt(64, 1, 64)
    step(tiny, torch.optim.AdamW(tiny.parameters()), tokens)
    del tiny
    give_back_memory()
    base, peak = resident_bytes(), Peak()
    model = Gpt(*SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, SIZES[size][2], (2, CONTEXT))
    step(model, optimizer, tokens)
    peak.reset()
    step(model, optimizer, tokens)
    found = {"parameters": sum(p.numel() for p in model.parameters()), "plain": peak.bytes - base}
    with (
        join(address, region=_REGION, credentials=credentials) as site,
        site.training(model) as sync,
    ):
        peak.reset()
        if held:
            threading.Thread(target=_show, args=(4 * found["parameters"],), daemon=True).start()
        for _ in sync.batches(range(1)):
            loss = step(model, optimizer, tokens)
            if sync.steps < INTERVAL * ROUNDS // 2:
                optimizer.zero_grad()
            sync.step(rows=len(tokens), loss=loss)
            if sync.steps == INTERVAL * ROUNDS // 2:
                found["joined"] = peak.bytes - base
            if sync.steps == INTERVAL * (ROUNDS - 1) + 1:
                found["between"] = resident_bytes() - base
        found["joined_stay"] = peak.bytes - base
        peak.reset()
    return found | {"end": peak.bytes - base}


class Peak:
    """The kernel's record of this process's largest resident size."""

    def reset(self) -> None:
        """Begin again with the present size."""
        give_back_memory()
        Path("/proc/self/clear_refs").write_text("5", "ascii")

    @property
    def bytes(self) -> int:
        """The largest size since `reset`."""
        text = Path("/proc/self/status").read_text("ascii")
        return 1024 * int(text.partition("VmHWM:")[2].split()[0])


def _show(model_bytes: int) -> None:
    """Show the large tensors, and in which containers they are, whenever the size has grown."""
    most = 0
    while True:
        time.sleep(0.01)
        if resident_bytes() < most + model_bytes // 10:
            continue
        most, seen = resident_bytes(), Counter[Any]()
        for each in gc.get_objects():
            if isinstance(each, dict | list | tuple):
                values = each.items() if isinstance(each, dict) else enumerate(each)
                for key, value in list(values):
                    if isinstance(value, torch.Tensor) and value.numel() * 16 > model_bytes:
                        seen[str(key)[:30], value.numel() * 4 // (model_bytes // 100)] += 1
        print(f"{most / model_bytes:.2f}: {dict(seen)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
