"""Large buffers that are used again once nobody holds them."""

from __future__ import annotations

import numpy as np
import torch

from geo_ray.base.memory import ReusedMemory

LARGE = 2**18  # fp32 that are just large enough to be worth it


def place(buffer: memoryview) -> int:
    return int(np.asarray(buffer).ctypes.data)


def test_a_buffer_that_nobody_holds_is_used_again() -> None:
    memory = ReusedMemory()
    first = memory.buffer(4 * LARGE)
    at = place(first)
    assert at % 64 == 0 and first.nbytes == 4 * LARGE and not first.readonly
    del first
    assert place(memory.buffer(4 * LARGE)) == at


def test_a_buffer_is_held_by_whatever_looks_into_it() -> None:
    memory = ReusedMemory()
    tensor = memory.tensor(LARGE)
    at = tensor.data_ptr()
    part = tensor.view(2, -1)[1, 5:].numpy()
    del tensor
    other = memory.tensor(LARGE)
    assert other.data_ptr() != at
    part[:] = 1.0
    del part
    assert memory.tensor(LARGE).data_ptr() == at


def test_a_shorter_one_takes_the_place_of_a_longer_one_but_not_of_a_much_longer_one() -> None:
    memory = ReusedMemory()
    tensor = memory.tensor(4 * LARGE)
    at = tensor.data_ptr()
    del tensor
    tensor = memory.tensor(3 * LARGE)
    assert tensor.data_ptr() == at and tensor.shape == (3 * LARGE,)
    held = memory.tensor(LARGE)
    del tensor
    assert memory.buffer(4 * LARGE).nbytes == held.numel() * 4


def test_small_ones_are_made_as_ever() -> None:
    memory = ReusedMemory()
    assert memory.buffer(7).nbytes == 7 and memory.tensor(3).shape == (3,)
    assert memory.tensor(0).shape == (0,) and not memory._free
    assert memory.tensor(3).dtype is torch.float32
