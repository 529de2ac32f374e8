"""One region of torchft's DiLoCo: a replica group of one process. `peers.py` starts it.

As torchft's documentation and its own DiLoCo trainer do it: a Lighthouse (in the first region), a
Manager per replica group with a synchronous quorum, `ProcessGroupGloo` between the groups, and
`torchft.local_sgd.DiLoCo` around the loop. What is chosen in its favour, each seen to be faster or
at least not slower here:

- `fragments` and `delay_steps` make it Streaming DiLoCo: exchanges hide behind training for as many
  steps as it allows.
- Buckets: one exchange per fragment. One per tensor, its default, takes half as long again.
- The first quorum is joined before the clock starts, so that connecting is not counted.
- Heartbeats once a second rather than ten times: they would cross the WAN.

Quantised exchanges (`should_quantize`) need Triton and an accelerator: on CPUs fp32 travels. What
is evaluated are the regions' own models, which have the steps that the outer ones lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]
from torchft.manager import Manager  # type: ignore[import-not-found]
from torchft.process_group import ProcessGroupGloo  # type: ignore[import-not-found]

from benchmarks.peers import peers_work

LIGHTHOUSE_PORT = 29510
TIMEOUT = timedelta(seconds=120)


class Replica:
    """See the module's docstring.

    Args:
        hello: which region of which workload this is.
    """

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self._host, self._index = hello["host"], hello["index"]
        self._regions, self._options = hello["regions"], hello["options"]
        self._work = peers_work.Workload(**hello["workload"])
        self._region = peers_work.Region(self._work, self._index, self._regions, hello["seed"])
        self._lighthouse: Any = None

    def open(self) -> dict[str, Any]:
        """Start the Lighthouse, in the first region."""
        if self._index == 0:
            self._lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=self._regions, join_timeout_ms=1000
            )
        return {"address": f"http://{self._host}:{LIGHTHOUSE_PORT}"}

    def connect(self, address: str) -> dict[str, Any]:
        """Make the manager and DiLoCo, and have a first quorum."""
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._store = store
        model, work = self._region.model, self._work
        self._inner = torch.optim.AdamW(model.parameters(), lr=work.lr, fused=True)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=self._regions,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=self._host,
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"region_{self._index}",
            hostname=self._host,
            heartbeat_interval=timedelta(seconds=1),
            init_sync=False,  # the models are alike, as its documentation says one may
        )
        fragments = fragments_of(model, self._options["fragments"])
        self._diloco = DiLoCo(
            self._manager,
            fragments,
            self._inner,
            [
                torch.optim.SGD(
                    fragment.parameters(),
                    lr=work.outer_lr,
                    momentum=work.outer_momentum,
                    nesterov=True,
                )
                for fragment in fragments
            ],
            sync_every=work.interval,
            use_bucketization=True,
            fragment_sync_delay=self._options["delay_steps"],
            fragment_update_alpha=self._options["alpha"],
        )
        self._manager.start_quorum()
        self._manager.wait_quorum()
        return {"participants": self._manager.num_participants()}

    def train(self) -> dict[str, Any]:
        """Train inside DiLoCo."""
        with self._diloco:
            return self._region.train(
                self._inner,
                rounds=lambda: int(self._manager.current_step()) // self._options["fragments"],
            )

    def close(self) -> dict[str, Any]:
        """End the manager, then the Lighthouse."""
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
        return {}


class Fragment(nn.Module):
    """Some modules and parameters of a model.

    Args:
        parts: what it consists of.
    """

    def __init__(self, parts: Iterable[nn.Module | nn.Parameter]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            setattr(self, f"part{number}", part)


def fragments_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The model cut into fragments at its blocks; embeddings go with the first, the head last."""
    if count == 1:
        return [model]
    blocks = list(cast(nn.ModuleList, model.blocks))
    if len(blocks) % count:
        raise ValueError(f"{len(blocks)} blocks do not make {count} fragments")
    per = len(blocks) // count
    cut: list[list[nn.Module | nn.Parameter]] = [
        list(blocks[start : start + per]) for start in range(0, len(blocks), per)
    ]
    cut[0] += [cast(nn.Module, model.embed), cast(nn.Parameter, model.position)]
    cut[-1].append(cast(nn.Module, model.norm))
    return [Fragment(parts) for parts in cut]


def main() -> None:
    peers_work.serve(Replica)


if __name__ == "__main__":
    main()
