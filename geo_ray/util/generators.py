"""Torch's generators, which all threads of a process share.

PyTorch reads a generator's state into a new tensor while it holds the generator's lock. If Python
collects garbage at that moment, another thread may get the interpreter and wait, with it, for the
same lock: then both wait for ever (seen with torch 2.x; workers of several regions in one process).
So one thread at a time reads or sets what generators hold. Threads still share the generators: who
wants the same numbers again computes in a process of its own, as workers do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

_ONE_AT_A_TIME: Final = threading.Lock()


@contextmanager
def generators_restored(devices: Sequence[int] = ()) -> Iterator[None]:
    """Run the block, then put torch's generators back to where they were.

    Args:
        devices: numbers of the CUDA devices whose generators it uses, beside the CPU's.
    """
    forked = torch.random.fork_rng(devices=list(devices))
    with _ONE_AT_A_TIME:
        forked.__enter__()
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            forked.__exit__(None, None, None)


def plant(seed: int, devices: Sequence[int] = ()) -> None:
    """Seed the CPU's generator and those of the named CUDA devices.

    What `torch.manual_seed` does, without the trace that it takes for other devices.
    """
    with _ONE_AT_A_TIME:
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
