"""One region of a hivemind swarm: a DHT and a `hivemind.Optimizer`. `peers.py` starts it.

As hivemind's documentation has it. What is chosen in its favour, each seen to be faster here:

- `use_local_updates`: every step counts at once, and parameters are averaged once per
  `target_batch_size`, which is what the other systems take between two rounds. The default would
  make one step of AdamW out of all those batches, which learns far less from as many tokens.
- The averaging is not delayed. Delayed local updates wait for the round at the next step anyway,
  and the swarm's progress counts that time as if samples were made in it, so that rounds follow
  each other ever faster.
- `target_group_size` is the number of regions, so that matchmaking ends when all are there instead
  of after `matchmaking_time`; that is 3 s, which the documentation has for small runs.
- Large tensors travel in 8 bits, small ones in fp16, as in hivemind's own ALBERT example.
- Progress is asked for at least once a second, so that rounds begin when they are due.

What stays: the swarm guesses from its speed when a batch is full, so a round is some 10 % longer
than asked; the last one may be cut off by the end of the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hivemind  # type: ignore[import-not-found]
import torch
from hivemind.compression import (  # type: ignore[import-not-found]
    Float16Compression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)

from benchmarks.peers import peers_work

LARGE_ELEMENTS = 2**16 + 1  # as in the ALBERT example


class Peer:
    """See the module's docstring.

    Args:
        hello: which region of which workload this is.
    """

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self._regions, self._matchmaking_s = hello["regions"], hello["options"]["matchmaking_s"]
        self._work = peers_work.Workload(**hello["workload"])
        self._index = hello["index"]
        self._region = peers_work.Region(self._work, self._index, self._regions, hello["seed"])
        self._listen = [f"/ip4/{hello['host']}/tcp/0"]
        self._dht: Any = None

    def open(self) -> dict[str, Any]:
        """Start the swarm, in the first region."""
        if self._index:
            return {"address": []}
        self._dht = hivemind.DHT(host_maddrs=self._listen, start=True)
        return {"address": [str(address) for address in self._dht.get_visible_maddrs()]}

    def connect(self, address: list[str]) -> dict[str, Any]:
        """Join the swarm and make the optimizer."""
        if self._dht is None:
            self._dht = hivemind.DHT(initial_peers=address, host_maddrs=self._listen, start=True)
        work = self._work
        self._optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="peers",
            batch_size_per_step=work.batch_size,
            target_batch_size=work.interval * work.batch_size * self._regions,
            params=self._region.model.parameters(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=work.lr, fused=True),
            use_local_updates=True,
            delay_state_averaging=False,
            matchmaking_time=self._matchmaking_s,
            averaging_timeout=15.0,
            state_averaging_compression=SizeAdaptiveCompression(
                threshold=LARGE_ELEMENTS,
                less=Float16Compression(),
                greater_equal=Uniform8BitQuantization(),
            ),
            tracker_opts={
                "min_refresh_period": 0.2,
                "default_refresh_period": 0.5,
                "max_refresh_period": 1.0,
            },
            averager_opts={"request_timeout": 1.0, "target_group_size": self._regions},
        )
        return {}

    def train(self) -> dict[str, Any]:
        """Train inside the swarm."""
        return self._region.train(
            self._optimizer,
            rounds=lambda: int(self._optimizer.local_epoch),
            beyond=self._work.interval // 2,  # the last round is over everywhere, the next not due
        )

    def close(self) -> dict[str, Any]:
        """Leave the swarm."""
        self._optimizer.shutdown()
        self._dht.shutdown()
        return {}


def main() -> None:
    peers_work.serve(Peer)


if __name__ == "__main__":
    main()
