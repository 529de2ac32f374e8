"""Cost of a step between two exchanges, against the same loop without geo_ray.

One region of one rank trains a small GPT with AdamW on the CPU. Steps with and without `sync.step`
alternate in blocks within one process, so that both see the same load. The interval is longer than
the measurement, so that no exchange is in it. Memory is the process's resident size: before the
region joined, and after its first exchange.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import support
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.joining.site import join
from geo_ray.transport.security.certs import Authority

SIZES = {"10M": (256, 10, 8192), "125M": (768, 12, 50257)}  # width, layers, vocabulary
CONTEXT = 32


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token, from tokens (N, T)."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.blocks(x, mask=mask, is_causal=True) @ self.embed.weight.T
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """Make one optimizer step."""
    optimizer.zero_grad()
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    return loss


def measure(name: str, blocks: int, per_block: int) -> dict[str, Any]:
    """Return the times of both kinds of steps in alternating blocks."""
    torch.manual_seed(0)
    model = Gpt(*SIZES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, SIZES[name][2], (2, CONTEXT))
    step(model, optimizer, tokens)
    with tempfile.TemporaryDirectory() as text:
        folder, authority, key = Path(text), Authority.create("benchmark"), secrets.token_bytes(32)
        for each in ("here", SERVER):
            JoinCredentials(each, "run", key, authority.issue(each)).write(folder / f"{each}.pem")
        steps = blocks * per_block
        values = {
            "name": "benchmark",
            "regions": ["here"],
            "steps": steps,
            "strategy": {"kind": "diloco", "interval": steps},
        }
        terms = JoinTerms.model_validate_json(json.dumps(values))
        server = JoinServer(terms, JoinCredentials.read(folder / f"{SERVER}.pem"))
        address = "geo-ray://{}:{}".format(*server.address)
        plain_s, joined_s, own_s = [], [], []
        with (
            join(address, region="here", credentials=folder / "here.pem") as site,
            site.training(model) as sync,
        ):
            for block in range(blocks):
                times: dict[bool, list[float]] = {True: [], False: []}
                for is_joined in (block % 2 == 0, block % 2 == 1):
                    for number in range(per_block):
                        began_s = time.perf_counter()
                        loss = step(model, optimizer, tokens)
                        computed_s = time.perf_counter()
                        is_last = block == blocks - 1 and number == per_block - 1
                        if is_joined and not is_last:
                            sync.step(rows=len(tokens), loss=loss)
                            own_s.append(time.perf_counter() - computed_s)
                        times[is_joined].append(time.perf_counter() - began_s)
                plain_s.append(statistics.median(times[False]))
                joined_s.append(statistics.median(times[True]))
                support.say(f"{name}: block {block + 1} of {blocks}")
            before_bytes, began_s = resident_bytes(), time.perf_counter()
            while not sync.done:
                sync.step(rows=1)
            exchange_s = time.perf_counter() - began_s
        server.close()
    ratios = [joined / plain for joined, plain in zip(joined_s, plain_s, strict=True)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plain_s": statistics.median(plain_s),
        "joined_s": statistics.median(joined_s),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "sync_step_s": statistics.median(own_s),
        "exchange_s": exchange_s,
        "before_exchange_bytes": before_bytes,
        "after_exchange_bytes": resident_bytes(),
    }


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure both sizes and write the record."""
    chosen = support.parse(__doc__)
    torch.set_num_threads(2)
    machine, figures = support.hardware(), []
    for name in ("10M",) if chosen.quick else tuple(SIZES):
        found = measure(name, 4 if chosen.quick else 12, 3 if name == "125M" else 15)
        figures += [
            support.median(f"ratio of step times, {name}", found["ratios"], "ratio", "<= 1.03"),
            support.Figure(f"seconds of a step, {name}", found["joined_s"], "s"),
            support.Figure(f"seconds in sync.step, {name}", found["sync_step_s"], "s"),
            support.Figure(f"seconds of one exchange, {name}", found["exchange_s"], "s"),
            support.Figure(
                f"memory after the exchange, in models, {name}",
                found["after_exchange_bytes"] / (4 * found["parameters"]),
                "models",
                baseline=found["before_exchange_bytes"] / (4 * found["parameters"]),
            ),
        ]
    support.finish("joining.step_time", machine, figures, chosen.out)


if __name__ == "__main__":
    main()
