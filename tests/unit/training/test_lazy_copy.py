"""A lazy copy has the content of its moment, whatever changes afterwards and whoever is faster."""

from __future__ import annotations

import gc
import pickle
import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.base.errors import InvariantError, RunDirectoryError
from geo_ray.training import lazy_copy
from geo_ray.training.lazy_copy import LazyCopy, StoredTensor, Unread

SIZE = 3 * (1 << 20) + 5  # three pieces and a rest


def read(
    copy: LazyCopy, *, secured_after: int = -1, live: torch.Tensor | None = None
) -> torch.Tensor:
    """All pieces together; after so many the live tensor is changed, as its owner does it."""
    found = []
    for number, piece in enumerate(copy.pieces()):
        found.append(piece.clone())
        if number == secured_after and live is not None:
            copy.secure()
            live.zero_()
    return torch.cat(found) if found else torch.empty(0, dtype=copy.dtype)


@pytest.mark.parametrize("after", [-1, 0, 1, 2, 3])
def test_a_change_between_two_pieces_is_not_seen(after: int) -> None:
    live = torch.arange(SIZE, dtype=torch.float32)
    before = live.clone()
    assert torch.equal(read(LazyCopy(live), secured_after=after, live=live), before)
    assert after < 0 or not live.any()


def test_a_change_before_the_first_piece_is_not_seen_either() -> None:
    live = torch.arange(SIZE, dtype=torch.float32)
    before, copy = live.clone(), LazyCopy(live)
    copy.secure()
    live.zero_()
    assert torch.equal(read(copy), before)


@pytest.mark.parametrize("copied", [deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("first", [False, True])
def test_a_copy_of_a_lazy_copy_has_the_content_of_its_moment(copied: Any, first: bool) -> None:
    live, unread = torch.arange(6.0).reshape(2, 3), Unread()
    before, lazy = live.clone(), unread.copy({"a": live})["a"]
    if not first:
        unread.secure()
        live.zero_()
    lazy_again, unread_again = copied((lazy, unread))
    unread.secure()
    live.fill_(-1.0)
    unread_again.secure()
    assert torch.equal(lazy_again.whole(), before) and torch.equal(lazy.whole(), before)
    assert torch.equal(copied(lazy_again).whole(), before)


def test_a_lazy_copy_that_was_read_in_part_is_not_copied() -> None:
    lazy = LazyCopy(torch.arange(SIZE))
    next(lazy.pieces())
    with pytest.raises(InvariantError, match="read already"):
        deepcopy(lazy)


@pytest.mark.parametrize("value", [torch.tensor(7.0), torch.empty(0), torch.ones(2, 3).long()])
def test_small_tensors_keep_shape_and_type(value: torch.Tensor) -> None:
    copy = LazyCopy(value)
    assert (copy.shape, copy.dtype, copy.numel()) == (value.shape, value.dtype, value.numel())
    assert copy.element_size() == value.element_size()
    assert torch.equal(copy.whole(), value) and copy.whole().dtype == value.dtype
    assert torch.equal(read(LazyCopy(value)), value.reshape(-1))


def test_the_owner_secures_all_that_is_not_let_go_of() -> None:
    unread, live, fixed = Unread(), torch.ones(4), torch.full((4,), 5.0)
    first = unread.copy({"a": live}, {"b": fixed})
    second = unread.copy({"a": live})
    unread.secure()
    live.zero_()
    assert torch.equal(first["a"].whole(), torch.ones(4))
    assert torch.equal(second["a"].whole(), torch.ones(4))
    assert first["b"].whole().data_ptr() == fixed.data_ptr()  # it never changes: no copy


def test_what_was_read_is_copied_no_more() -> None:
    live = torch.ones(SIZE)
    copy = LazyCopy(live)
    for _ in copy.pieces():
        pass
    copy.secure()
    assert not copy._saved.numel() and copy._live.untyped_storage().nbytes() == 0


def test_reader_and_owner_meet_and_only_the_rest_is_copied() -> None:
    live = torch.arange(SIZE, dtype=torch.float32)
    before, copy = live.clone(), LazyCopy(live)
    reader = copy.pieces()
    found = [next(reader).clone(), next(reader).clone()]  # two of four pieces
    copy.secure()
    live.zero_()
    assert copy._saved.numel() == SIZE - 2 * (1 << 20)
    assert torch.equal(torch.cat([*found, *(piece.clone() for piece in reader)]), before)
    assert not copy._saved.numel()


def test_reader_and_owner_work_at_the_same_time() -> None:
    size = 40 * (1 << 20) // 4
    for _ in range(5):
        live = torch.arange(size, dtype=torch.float32)
        before, copy, found = live.clone(), LazyCopy(live), torch.empty(size)

        def read_all(copy: LazyCopy = copy, found: torch.Tensor = found) -> None:
            offset = 0
            for piece in copy.pieces():
                found[offset : offset + piece.numel()] = piece
                offset += piece.numel()

        reader = threading.Thread(target=read_all)
        reader.start()
        copy.secure()
        live.zero_()
        reader.join()
        assert torch.equal(found, before)


def test_who_lets_go_costs_the_owner_nothing() -> None:
    unread, live = Unread(), torch.ones(SIZE)
    copies = unread.copy({"a": live})
    del copies
    gc.collect()
    assert [each() for each in unread._copies] == [None]
    unread.secure()
    assert not unread._copies


@given(st.integers(0, 40), st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
def test_a_stored_tensor_is_what_it_was(size: int, dtype: torch.dtype) -> None:
    value = torch.arange(size, dtype=torch.float32).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_copy, "_PIECE", 7)
        stored, expected = StoredTensor(value), value.clone()
        value.zero_()
        for _ in range(2):  # it may be read again
            assert torch.equal(stored.whole(), expected)
            pieces = [piece.clone() for piece in stored.pieces()]
            assert torch.equal(torch.cat([expected[:0], *pieces]), expected)
            assert max((piece.numel() for piece in pieces), default=0) <= 7


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = partial(open, "/dev/full", "w+b")
    monkeypatch.setattr(lazy_copy.tempfile, "TemporaryFile", full)
    with pytest.raises(RunDirectoryError, match="No space left") as caught:
        StoredTensor(torch.zeros(1))
    assert "TMPDIR" in caught.value.fix
