"""Memory of groups: numbers worked out by hand, PyTorch's own tool, and vectors of exchanges."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import nn

from geo_ray.base.errors import ModelTooLargeError
from geo_ray.planner.memory import (
    PROCESS_BYTES,
    Activations,
    ExchangeMemory,
    GroupLayout,
    MemoryModel,
    ModelSizes,
    OptimizerSize,
    ParameterSize,
    Sharding,
)
from geo_ray.runs.memory_probe import exchange_memory
from geo_ray.runs.plan_inputs import sizes_of
from geo_ray.strategies.config import AnyStrategy, CodecConfig
from tests.support.fsdp_memory import Gpt

NOTHING = ExchangeMemory(0, 0, 0, 0)
TWO_LAYERS = ModelSizes(
    root=(ParameterSize((10, 4)),),
    units=((ParameterSize((4, 4)), ParameterSize((4,))), (ParameterSize((4, 4), trained=False),)),
)


def model_of(
    sharding: Sharding, ranks: int, outline: ModelSizes = TWO_LAYERS, **changes: Any
) -> MemoryModel:
    values = {"exchange": NOTHING, "on_accelerator": False, "optimizer": OptimizerSize(2)}
    return MemoryModel(outline, layout=GroupLayout(sharding, ranks), **(values | changes))


def test_one_rank_holds_everything() -> None:
    """40 + 20 trained and 16 frozen parameters: 4 bytes each, gradients and two states of 60."""
    assert model_of("none", 1).device() == {"parameters": 304, "gradients": 240, "optimizer": 480}


def test_ddp_also_holds_buckets_of_gradients() -> None:
    assert model_of("ddp", 4).device()["gradients"] == 480


def test_shards_are_padded_to_equal_rows() -> None:
    """Of 10, 4, 4 and 4 rows, three ranks hold 4, 2, 2 and 2: 16 + 8 + 2 trained, 8 frozen."""
    found = model_of("fsdp", 3).device()
    assert found["parameters"] == 4 * (26 + 8)
    assert (found["gradients"], found["optimizer"]) == (4 * 26, 8 * 26)
    # The root (160 bytes) and its gradients, the unit of 20 twice, its gradients twice.
    assert found["gathered"] == 160 + 160 + 4 * 80 - 4 * 16


def test_a_step_of_the_optimizer_may_need_more_than_the_backward_pass() -> None:
    found = model_of("none", 1, optimizer=OptimizerSize(2, temporary=1)).device()
    assert found["temporary"] == 240
    rows = Activations(100, 3)
    found = model_of("none", 1, optimizer=OptimizerSize(2, temporary=1), activations=rows).device()
    assert (found["activations"], "temporary" in found) == (300, False)


@pytest.mark.parametrize(
    ("layout", "exchanged"),
    [
        (GroupLayout("none", 1), 60),
        (GroupLayout("ddp", 4), 15),  # each rank a quarter
        (GroupLayout("fsdp", 2), 30),
        (GroupLayout("hsdp", 4, replicas=2), 15),  # half of a half
    ],
)
def test_ranks_share_the_exchange(layout: GroupLayout, exchanged: int) -> None:
    exchange = ExchangeMemory(8, 16, 8, 20)
    found = MemoryModel(TWO_LAYERS, OptimizerSize(), layout, exchange)
    assert found.exchanged_per_rank == exchanged
    memory = found.memory()
    assert memory.rank_bytes == 16 * exchanged + PROCESS_BYTES
    assert memory.server_bytes == (4 + 20) * 60 + PROCESS_BYTES


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    ranks=st.integers(1, 9),
    item_bytes=st.sampled_from([2, 4]),
)
def test_shards_cover_the_model(rows: int, columns: int, ranks: int, item_bytes: int) -> None:
    """Against `torch.chunk`, which `fully_shard` uses: no rank has more than the largest chunk."""
    outline = ModelSizes((ParameterSize((rows, columns), item_bytes),))
    found = model_of("fsdp", ranks, outline).device()
    largest = torch.chunk(torch.empty(rows, columns, device="meta"), ranks)[0].numel()
    assert found["parameters"] == item_bytes * largest
    assert found["parameters"] * ranks >= item_bytes * rows * columns


def test_an_outline_has_tied_parameters_once_and_layers_as_units() -> None:
    with torch.device("meta"):
        model = Gpt(width=64, layers=3, vocabulary=100, context=8).to(torch.bfloat16)
    model.head.weight = model.embed.weight
    model.blocks[1].requires_grad_(False)
    found = sizes_of(model, list(model.blocks))
    assert [len(unit) for unit in found.units] == [12, 12, 12]
    assert {each.item_bytes for each in found.parameters} == {2}
    assert found.num_params == sum(p.numel() for p in model.parameters())
    assert found.num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    sizes = [sum(p.size for p in unit) for unit in found.units]
    assert sizes == [sum(p.numel() for p in model.blocks[0].parameters())] * 3
    assert sizes_of(nn.Linear(3, 2)).root == (ParameterSize((2, 3)), ParameterSize((2,)))
    assert len(sizes_of(nn.Sequential(*(nn.Linear(9, 9) for _ in range(10)))).units) == 10


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, ((1024, 12, 8192), (256, 2, 50_000))), (8, ((512, 6, 20_000),))],
)
def test_the_peak_is_that_of_pytorchs_own_tool(
    ranks: int, sizes: tuple[tuple[int, int, int], ...]
) -> None:
    """Never below it, and at most 17 % above it."""
    cases = [
        {
            "width": width,
            "layers": layers,
            "vocabulary": vocabulary,
            "context": 16,
            "rows": 1,
            "mixed": mixed,
        }
        for (width, layers, vocabulary), mixed in product(sizes, (False, True))
    ]
    command = [sys.executable, "-m", "tests.support.fsdp_memory", str(ranks)]
    text = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=True
    ).stdout
    for case, found in zip(cases, json.loads(text), strict=True):
        with torch.device("meta"):
            model = Gpt(case["width"], case["layers"], case["vocabulary"], case["context"])
        precision = {"compute_bytes": 2, "reduce_bytes": 4} if case["mixed"] else {}
        layout = GroupLayout("fsdp", ranks, **precision)
        own = MemoryModel(
            sizes_of(model, list(model.blocks)),
            OptimizerSize(1),
            layout,
            NOTHING,
            on_accelerator=False,
        ).device()
        shards = found["Sharded Param"], found["OptState"]
        assert (own["parameters"], own["optimizer"]) == pytest.approx(shards, rel=1e-3)
        assert found["Total"] <= sum(own.values()) <= 1.17 * found["Total"], case


def exchange_of(
    kind: str, regions: int = 2, codec: str | None = None, keeps_vector: bool = True, **options: Any
) -> ExchangeMemory:
    strategy = TypeAdapter(AnyStrategy).validate_python({"kind": kind, **options})
    both = {} if codec is None else {"up": {"kind": codec}, "down": {"kind": codec}}
    codecs = CodecConfig.model_validate(both)
    return exchange_memory(strategy, codecs, regions, keeps_vector=keeps_vector)


@pytest.mark.parametrize("regions", [2, 4])
def test_diloco_holds_what_its_rule_says(regions: int) -> None:
    """Rank: parameters and anchor, and a quarter of a change or an answer, which is queued.

    Server: momentum, and in a round the updates, of which one becomes the answer.
    """
    found = exchange_of("diloco", regions, interval=3)
    vectors = [found.rank_rest, found.rank_peak, found.server_rest, found.server_peak]
    expected = [2, 2.25, 1, 1 + regions]
    assert [vector / 4 for vector in vectors] == pytest.approx(expected, rel=1e-3)


def test_without_pinned_memory_the_parameters_are_read_again() -> None:
    found = exchange_of("diloco", interval=3, keeps_vector=False)
    # At the end: the anchor, and the parameters, which are sent from there.
    assert (found.rank_rest / 4, found.rank_end / 4) == (1, 2)


def test_an_overlap_holds_a_snapshot_and_the_update_in_flight() -> None:
    """Rank: parameters, anchor, mark, and the change that is being sent or an answer."""
    found = exchange_of("one_step_delay", interval=3)
    assert (found.rank_rest / 4, found.rank_peak / 4) == (4, 4)


def test_without_pinned_memory_a_change_takes_the_place_of_the_parameters() -> None:
    """Anchor and a quarter; the delayed exchange has anchor, mark, and change or answer."""
    assert exchange_of("diloco", interval=3, keeps_vector=False).rank_peak == 4 * 1.25
    assert exchange_of("one_step_delay", interval=3, keeps_vector=False).rank_peak == 4 * 3


def test_a_lossy_codec_owes_a_vector_at_both_ends() -> None:
    plain, coded = exchange_of("diloco"), exchange_of("diloco", codec="int4")
    assert coded.rank_rest - plain.rank_rest == 4
    assert coded.server_rest - plain.server_rest == 4


def test_what_does_not_fit_is_refused_with_a_fix() -> None:
    outline = ModelSizes((ParameterSize((1000, 1000)),), ((ParameterSize((10**6, 10**3)),),) * 7)
    layout = GroupLayout("ddp", 8, ranks_per_host=8)
    rows = Activations(1e9, 4)
    model = MemoryModel(outline, OptimizerSize(), layout, ExchangeMemory(8, 16, 8, 20), rows)
    with pytest.raises(ModelTooLargeError, match="parameters 28 GB, gradients 56") as caught:
        model.check("region 'us'", device_gb=80)
    assert "region 'us': a rank needs 146 GB" in caught.value.message
    assert caught.value.fix == "Shard the model with fsdp."
    with pytest.raises(ModelTooLargeError, match="8 ranks of a machine need 117 GB"):
        model.check("region 'us'", host_gb=100)
    assert model.check("region 'us'", device_gb=160, host_gb=120).device_bytes < 152e9


def test_the_fix_fits() -> None:
    """4e9 parameters on two ranks: 8 + 8 + 16 GB, 1.6 GB gathered and 1.5 GB of reserve."""
    outline = ModelSizes((ParameterSize((8, 8)),), ((ParameterSize((10**4, 10**4)),),) * 40)
    layout = GroupLayout("fsdp", 2, ranks_per_host=2)
    model = MemoryModel(outline, OptimizerSize(), layout, NOTHING, Activations(3e9, 9))
    # 47.5 GB are usable: 12.4 GB are left, for 4 rows.
    with pytest.raises(ModelTooLargeError) as caught:
        model.check("it", device_gb=50)
    assert caught.value.fix == "Use at most 4 rows per rank at a time, with train.accumulate."
    # 22.8 GB: on four ranks 16 + 1.6 + 1.5 GB, and 3.7 GB are left for a row.
    with pytest.raises(ModelTooLargeError) as caught:
        model.check("it", device_gb=24)
    assert caught.value.fix.startswith("Use 4 ranks with fsdp, at most 1 rows per rank")
    with pytest.raises(ModelTooLargeError) as caught:
        model.check("it", device_gb=3)
    assert caught.value.fix.startswith("More ranks do not help")
