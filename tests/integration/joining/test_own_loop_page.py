"""The pages about loops and LoRA, followed by a reader; what they say about the library."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import geo_ray
from geo_ray.base.errors import JoinError
from geo_ray.joining.rank import STRATEGIES
from tests.support.pages import BIN, ROOT, Reader, blocks, commands, save
from tests.support.train_support import WAIT_S, eventually

PAGE = "docs/guides/your-own-loop.md"
LORA = "docs/guides/lora.md"
TEXT = (ROOT / PAGE).read_text()


def test_the_page_names_what_there_is() -> None:
    (strategies,) = re.findall(r"to the loop: (.*?)\. Others", TEXT, flags=re.S)
    assert re.findall(r"`(\w+)`", strategies) == list(STRATEGIES)
    named = set(re.findall(r"^\| `([A-Z_]+)`", TEXT, flags=re.M))
    assert named == {each.code for each in JoinError.__subclasses__()}
    listed = set(re.findall(r"\| `(\w+\.py)` \|", TEXT))
    examples = {path.name for path in (ROOT / "examples" / "own_loop").glob("*.py")}
    assert listed == examples
    tests = "".join(
        (ROOT / f"tests/integration/joining/test_own_loop_{name}.py").read_text()
        for name in ("examples", "trainers")
    )
    for name in examples:
        assert re.search(rf"\b{Path(name).stem}\b", tests), f"no test runs {name}"


@pytest.mark.slow  # a cluster, and three processes that train
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(PAGE)
    shutil.copytree(ROOT / "examples", "examples")
    assert [block.saved_as for block in blocks(PAGE) if block.saved_as] == [
        "joined.yaml",
        "my_loop.py",
    ]
    serve, *regions = commands(PAGE)
    follow(serve, regions, Path("runs/joined"), Reader(monkeypatch))


@pytest.mark.slow  # the same, with transformers
def test_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page about LoRA, with a smaller model: only adapters cross, and both are equal."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    save(LORA)
    loop = Path("train_lora.py")
    small = "vocab_size=len(tokenizer), n_layer=2, n_embd=64, n_head=2"
    assert loop.read_text().count("vocab_size=len(tokenizer)") == 1
    loop.write_text(loop.read_text().replace("vocab_size=len(tokenizer)", small))
    Path("texts").mkdir()
    for page in ("data", "tasks"):
        shutil.copy(ROOT / f"docs/guides/{page}.md", f"texts/{page}.txt")
    make, serve, *regions = commands(LORA)
    reader = Reader(monkeypatch)
    reader.run(make)
    follow(serve, regions, Path("runs/lora"), reader)
    adapters = [load_file(f"{name}-adapter/adapter_model.safetensors") for name in ("eu", "us")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    size = sum(value.numel() for value in adapters[0].values())
    run = geo_ray.open_run("runs/lora")
    assert size == 2 * (8 * 64 + 8 * 3 * 64)
    assert [each["bytes_sent"] for each in run.events("exchange")] == [4 * size] * 4
    assert sum(run.summary.wan_bytes.values()) < 30 * 4 * size


def follow(serve: str, regions: list[str], run: Path, reader: Reader) -> None:
    """Serve a run, and start the regions' loops in the current directory."""
    program = [str(BIN / "geo-ray"), *shlex.split(serve)[1:], "--plain"]
    options = ["--set", "serve.port=0", "--set", "serve.host=127.0.0.1"]
    server = subprocess.Popen(program + options, stdout=subprocess.PIPE, text=True)
    address = run / "join" / "address"
    started = []
    try:
        eventually(
            lambda: server.poll() is not None or (address.exists() and address.read_text()),
            "the run is served",
        )
        reader.values["ADDRESS"] = address.read_text().strip()
        for name in ("eu", "us"):
            shutil.copy(run / "join" / f"{name}.pem", ".")
        started = [
            subprocess.Popen(["bash", "-euc", reader.filled(each)], env=reader.environment())
            for each in regions
        ]
        assert [each.wait(WAIT_S) for each in started] == [0, 0]
        assert server.wait(WAIT_S) == 0
    finally:
        for each in (*started, server):
            if each.poll() is None:
                each.terminate()
                each.wait(WAIT_S)
    assert (run / "model.safetensors").exists()
