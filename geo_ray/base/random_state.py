"""Seeds and restores torch's random number generators, which all threads of a process share.

PyTorch reads the state of a generator into a new tensor while it holds its lock. If Python
collects garbage at that moment, another thread may take the interpreter lock and wait for the
same generator: a deadlock (seen with torch 2.x and several regions in one process). Therefore
only one thread at a time reads or sets generator state. Threads still share the generators:
reproducible numbers require a separate process, as workers have.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

_ONE_AT_A_TIME: Final = threading.Lock()


@contextmanager
def generators_restored(devices: Sequence[int] = ()) -> Iterator[None]:
    """Run the block, then restore torch's generators.

    Args:
        devices: CUDA devices whose generators it uses, in addition to the CPU's.
    """
    forked = torch.random.fork_rng(devices=list(devices))
    with _ONE_AT_A_TIME:
        forked.__enter__()
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            forked.__exit__(None, None, None)


def seed_generators(seed: int, devices: Sequence[int] = ()) -> None:
    """Seed the CPU's generator and those of the named CUDA devices.

    Like `torch.manual_seed`, without the stack trace that it records for other devices.
    """
    with _ONE_AT_A_TIME:
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)


def seed_of_rows(stream: str, start: int) -> int:
    """Return the seed of a step's random numbers.

    Args:
        stream: name of the rows' stream.
        start: position of the step's first row in it.
    """
    key = f"{stream}/{start}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with torch's CPU generator seeded; restore its state afterwards.

    Only the CPU generator is touched: `torch.manual_seed` would also reseed the accelerators, and
    models are initialised on the CPU.
    """
    with generators_restored():
        seed_generators(seed)
        yield
