"""The recipes of docs/guides/data.md, run as their reader runs them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

import geo_ray
from geo_ray.data.manifest import load_manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.checked_calls import checked_collate, checked_model
from geo_ray.data.tasks.load import TaskConfig, load_task
from tests.support.pages import Reader, commands, save

PAGE = "docs/guides/data.md"
REGIONS = ("us-east", "eu-west")
RUN = {
    "name": "recipe",
    "regions": [{"name": name, "workers": 1} for name in REGIONS],
    "strategy": {"kind": "sma", "interval": 2},
    "optimizer": {"kind": "adamw", "lr": 0.003},
    "train": {"steps": 40, "eval_every": 20},
}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    save(PAGE)
    return Reader(monkeypatch)


def batches(manifest: str) -> list[dict[str, np.ndarray]]:
    """All rows of all regions."""
    loaded = load_manifest(manifest)
    return [
        dict(batch)
        for region in REGIONS
        for split in ("train", "heldout")
        for batch in RegionReader(loaded, region, split, 0).scan(1000)  # type: ignore[arg-type]
    ]


def test_text_for_a_language_model(reader: Reader) -> None:
    Path("texts").mkdir()
    chance = np.random.default_rng(0)
    words = ["der", "Zug", "fährt", "heute", "nicht", "the", "train", "runs", "again", "日本"]
    texts = [
        [" ".join(chance.choice(words, chance.integers(1, 60))) for _ in range(30)]
        for _ in range(3)
    ]
    for number, documents in enumerate(texts):
        Path("texts", f"{number}.txt").write_text("\n\n".join(documents))
    for command in commands(PAGE, "Recipe: text for a language model"):
        reader.run(command)

    tokenizer = Tokenizer.from_file("tokenizer.json")
    rows = batches("data/texts/manifest.json")
    tokens, labels, documents = (
        np.concatenate([batch[name] for batch in rows])
        for name in ("tokens", "labels", "documents")
    )
    # An independent count: each document is encoded alone; every token but its first is a label.
    alone = [[*tokenizer.encode(text).ids, 0] for part in texts for text in part]
    counts = np.bincount([token for document in alone for token in document], minlength=500)
    assert np.array_equal(np.bincount(tokens[documents > 0], minlength=500), counts)
    later = np.bincount([token for document in alone for token in document[1:]], minlength=500)
    assert np.array_equal(np.bincount(labels[labels >= 0], minlength=500), later)
    assert tokenizer.decode(alone[0][:-1]) == texts[0][0]

    task = load_task(TaskConfig(use="lm.py:Text"), Path())
    model = checked_model(task, 0)
    batch = checked_collate(task, rows[0], torch.device("cpu"))
    logits = model(batch)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch), logits)
    # What another document of the row, or a later token, says changes no prediction.
    changed = dict(batch)
    second = batch["documents"] == 2
    changed["tokens"] = torch.where(second, 7, batch["tokens"])
    torch.testing.assert_close(model.train()(changed)[~second], logits[~second])
    changed["tokens"] = batch["tokens"].clone()
    changed["tokens"][:, 20] = 7
    torch.testing.assert_close(model(changed)[:, :20], logits[:, :20])

    run = geo_ray.simulate(
        RUN
        | {
            "task": {"use": "lm.py:Text"},
            "data": {"manifest": "data/texts/manifest.json", "batch_size": 8},
        }
    )
    losses = [row["value"] for row in run.metrics("eval.loss").to_pylist()]
    assert losses[-1] < losses[0] - 0.4


def test_folders_of_images(reader: Reader) -> None:
    chance = np.random.default_rng(0)
    for number in range(40):
        name = ("cat", "dog")[number % 2]
        shade = 40 if name == "cat" else 200
        pixels = chance.integers(shade, shade + 30, (9 + number % 5, 11, 3)).astype(np.uint8)
        path = Path("photos", name, f"{number}.{'png' if number % 3 else 'jpg'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    for command in commands(PAGE, "Recipe: folders of images"):
        reader.run(command)

    found = {}
    for batch in batches("data/photos/manifest.json"):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            found[image] = int(label)
            assert (np.asarray(Image.open(io.BytesIO(image))).mean() > 120) == bool(label)
    files = {
        path.read_bytes(): int(path.parent.name == "dog") for path in Path("photos").glob("*/*")
    }
    assert found == files
    run = geo_ray.simulate(
        RUN
        | {
            "task": {"use": "photos.py:Photos"},
            "optimizer": {"kind": "momentum", "lr": 0.001},
            "data": {"manifest": "data/photos/manifest.json", "batch_size": 8},
        }
    )
    assert run.summary.eval["auc"] == 1.0
