from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from geo_ray.base.errors import TaskLoadError
from geo_ray.data.tasks.bytelm import ByteLM, ByteTransformer, cut, stdlib_texts
from geo_ray.data.tasks.checked_calls import describe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "parameters"), [("0.1M", 120_576), ("1M", 1_040_768), ("10M", 10_028_160)]
)
def test_presets(size: str, parameters: int) -> None:
    options = ByteLM.Options.model_validate({"size": size})
    assert describe(ByteLM(options)).parameters == parameters


def test_the_largest_preset_without_its_memory() -> None:
    with torch.device("meta"):
        model = ByteTransformer(*ByteLM(ByteLM.Options(size="50M")).shape)
    assert sum(p.numel() for p in model.parameters()) == 49_564_160


def test_options_override_the_preset() -> None:
    task = ByteLM(ByteLM.Options(size="0.1M", dim=32, context=16))
    assert task.shape == (32, 2, 4, 16)
    assert task.columns == {"tokens": "uint8[17]"}


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(TaskLoadError, match="'heads'"):
        ByteLM(ByteLM.Options(size="0.1M", heads=7))


def test_the_embedding_is_tied_by_use_and_not_by_a_second_parameter() -> None:
    names = [name for name, _ in ByteTransformer(16, 1, 2, 8).named_parameters()]
    assert not any("head" in name for name in names)
    assert len(names) == len(set(names))


def test_no_byte_sees_the_future() -> None:
    model = ByteLM(ByteLM.Options(size="0.1M")).model(0)
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


def test_cut_predicts_each_byte_once() -> None:
    rows = cut(bytes(range(11)), 5)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert cut(bytes(range(10)), 5).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert cut(b"", 5).shape == (0, 6)


def test_the_text_is_capped_and_held_out_files_are_others() -> None:
    train, heldout = stdlib_texts(100_000)
    assert (len(train), len(heldout)) == (90_000, 10_000)
    again, _ = stdlib_texts(100_000)
    assert again == train
    larger, _ = stdlib_texts(200_000)
    assert larger.startswith(train)
    windows = {train[i : i + 200] for i in range(len(train) - 200)}
    assert not any(heldout[i : i + 200] in windows for i in range(0, len(heldout) - 200))


def test_an_interpreter_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(TaskLoadError, match="standard library"):
        stdlib_texts(10_000)


def test_too_little_text_for_one_sequence() -> None:
    with pytest.raises(TaskLoadError, match="max_bytes"):
        ByteLM(ByteLM.Options(size="1M", max_bytes=1000)).dataset(0)


def test_metrics_of_a_fresh_model_are_those_of_a_guess() -> None:
    task = ByteLM(ByteLM.Options(size="0.1M", max_bytes=50_000))
    columns = {"tokens": task.dataset(0).heldout["tokens"][:8]}
    stats = task.evaluate(task.model(0), task.collate(columns, CPU))
    metrics = task.metrics(stats)
    assert stats["bytes"].tolist() == [8 * 64]
    assert metrics["loss"] == pytest.approx(math.log(256), abs=0.3)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert 0 <= metrics["accuracy"] <= 1


def test_tokens_are_the_bytes_of_the_text() -> None:
    task = ByteLM(ByteLM.Options(size="0.1M", max_bytes=10_000))
    tokens = task.dataset(0).train["tokens"]
    assert tokens.dtype == np.uint8
    assert tokens[0].tobytes() == stdlib_texts(10_000)[0][:65]
