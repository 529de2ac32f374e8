"""The page on large models has the tables that its script computes from the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from benchmarks.planning import large_models
from benchmarks.planning.large_models import GPUS, Measured, Paper, on_meta
from geo_ray.joining.layout import Layout, shapes_in

ARCHIVE = Path(__file__).parents[3] / "docs" / "results" / "archive"
NAME = "2026-11-28-large-models"


@pytest.fixture(scope="module")
def measured() -> Measured:
    record = json.loads((ARCHIVE / NAME / "large_models.json").read_text("utf-8"))
    return Measured.of(record["figures"])


def test_the_page_has_the_tables_of_its_record(measured: Measured) -> None:
    page = (ARCHIVE / f"{NAME}.md").read_text("utf-8")
    for name, text in large_models._tables(measured):
        assert text in page, name


def test_parameters_are_those_of_the_meta_device() -> None:
    for name, (width, layers) in large_models.SIZES.items():
        paper = Paper(name, Measured({}, {}, {}, {}))
        assert paper.num_params == paper.sizes.num_trained
        assert paper.num_params == sum(p.numel() for p in on_meta(width, layers).parameters())
        assert len(paper.sizes.units) == layers + 1  # and the embedding


def test_slices_are_those_of_fsdp() -> None:
    """Rows of each parameter as `torch.chunk` cuts them."""
    model = on_meta(256, 1, 1003)
    layout = Layout.of(model)
    shares = large_models.shares_of(layout, GPUS)
    for rank, ranges in enumerate(shares):
        expected = 0
        for param in model.parameters():
            chunks = torch.chunk(torch.empty(param.shape, device="meta"), GPUS)
            expected += chunks[rank].numel() if rank < len(chunks) else 0
        assert sum(b - a for a, b in ranges) == expected
    assert (768 // GPUS, 256) in shapes_in(layout, shares[0])


def test_a_layer_needs_what_the_literature_says() -> None:
    """34 s b h bytes (Korthikanti et al., arXiv 2205.05198) without two dropout masks of 1 s b h,
    and without the scores of attention, whose fused kernel saves an output and a sum per row."""
    width = 512
    elements = large_models.CONTEXT * width
    found = large_models.layer_bytes(width)
    assert found == pytest.approx(32 * elements, rel=0.01)
    assert functional.scaled_dot_product_attention is not None  # restored


def test_operations_of_a_step_by_hand(measured: Measured) -> None:
    paper = Paper("1.3 B", measured)
    per_token = 6 * paper.num_params + 12 * 24 * 2048 * 2048
    assert paper.step_s == pytest.approx(per_token * 2**19 / (8 * 989e12 * 0.4))


def test_a_blocking_round_costs_what_it_takes(measured: Measured) -> None:
    paper = Paper("1.3 B", measured)
    seconds, steps = paper.round_s("int8", 5), 100 * paper.step_s
    assert paper.lost("diloco", "int8", 5) == pytest.approx(seconds / (seconds + steps))
    hidden = paper.lost("one_step_delay", "int8", 5)
    work = paper.work_s("int8")
    loop_s = work["read"] + work["merge"]
    assert seconds < steps  # one round of 1000 is at the end, where nothing hides it
    assert hidden == pytest.approx((loop_s + seconds / 1000) / (loop_s + steps), rel=0.01)
