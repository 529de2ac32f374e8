"""Exports for transformers and peft, read back by those libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import geo_ray
from geo_ray.base.errors import TaskOutputError
from geo_ray.base.random_state import seeded
from geo_ray.cli.main import root
from geo_ray.runs.model_export import export_model

pytestmark = pytest.mark.slow  # transformers and peft take seconds to import

TASKS = Path(__file__).resolve().parents[2] / "support" / "hf_tasks.py"
IDS = torch.arange(16).view(2, 8)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trained(name: str, folder: Path) -> geo_ray.Run:
    """A run of a task of hf_tasks.py."""
    return geo_ray.simulate(
        {
            "name": name.lower(),
            "task": {"use": f"{TASKS}:{name}"},
            "data": {"generate": {}, "batch_size": 4},
            "regions": [{"name": "us-east"}, {"name": "eu-west"}],
            "strategy": {"kind": "diloco", "interval": 2},
            "optimizer": {"kind": "adamw", "lr": 0.01},
            "train": {"steps": 4, "eval_every": 2, "keep_best": {"metric": "loss", "mode": "min"}},
            "run": {"dir": str(folder)},
        }
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def invoke(*words: str) -> str:
    done = CliRunner().invoke(root, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_from_pretrained_gives_equal_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.hf_tasks import TEXT, local_tokenizer

    run = trained("Gpt2", tmp_path)
    told = invoke("export", str(run.path), "--format", "hf", "--out", str(tmp_path / "hf"))
    assert str(tmp_path / "hf") in told
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(model), logits(run.model()))
    assert not torch.equal(logits(model), logits(_initial(run)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(TEXT).input_ids == local_tokenizer()(TEXT).input_ids
    about = json.loads((tmp_path / "hf" / "geo_ray.json").read_text())
    assert about["step"] == "4" and about["task"].endswith(":Gpt2")
    best = run.export(tmp_path / "best", best=True, format="hf")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(best)), logits(run.model(best=True))
    )


def _initial(run: geo_ray.Run) -> Any:
    from geo_ray.data.tasks.checked_calls import checked_model
    from geo_ray.data.tasks.load import load_task

    return checked_model(load_task(run.experiment.task, Path()), run.experiment.seed)


def test_the_adapter_of_a_frozen_model_gives_equal_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    from tests.support.hf_tasks import Lora

    run = trained("Lora", tmp_path)
    out = run.export(tmp_path / "adapter", format="adapter")
    names = {each.name for each in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "geo_ray.json"} <= names
    with seeded(run.experiment.seed):
        base = Lora(geo_ray.Options()).base()
    before = logits(base)
    found = logits(PeftModel.from_pretrained(base, out))
    assert torch.equal(found, logits(run.model()))
    assert not torch.equal(found, before)


def refused(task: Any, model: Any, folder: Path, form: Any) -> str:
    with pytest.raises(TaskOutputError) as caught:
        export_model(task, model, folder / "out", {}, form)
    assert list(folder.iterdir()) == []
    return f"{caught.value.message} {caught.value.fix}"


def test_a_model_that_its_format_would_change_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    from tests.support.hf_tasks import Gpt2, Lora

    task, lora = Gpt2(geo_ray.Options()), Lora(geo_ray.Options())
    assert "merge_and_unload" in refused(lora, lora.model(0), tmp_path, "hf")

    other: Any = task.model(0)
    other.lm_head = torch.nn.Linear(16, 61)
    found = refused(task, other, tmp_path, "hf")
    assert "the configuration of Gpt2's model describes another model: lm_head" in found
    untied: Any = task.model(0)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    assert "ties other parameters: lm_head.weight" in refused(task, untied, tmp_path, "hf")

    more: Any = lora.model(0)
    more.base_model.model.lm_head.weight.requires_grad_(True)
    found = refused(lora, more, tmp_path, "adapter")
    assert "outside of the adapter" in found and "lm_head.weight" in found
    two: Any = lora.model(0)
    two.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert "default, second" in refused(lora, two, tmp_path, "adapter")
    task.tokenizer = object()  # type: ignore[assignment]
    assert "PreTrainedTokenizerFast" in refused(task, task.model(0), tmp_path, "hf")


def test_modules_to_save_and_a_named_adapter_are_in_the_directory(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    from tests.support.hf_tasks import Lora

    task = Lora(geo_ray.Options())
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with seeded(0):
        model: Any = get_peft_model(task.base(), config, adapter_name="region")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    export_model(task, model, tmp_path / "adapter", {}, "adapter")
    with seeded(0):
        base = task.base()
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), logits(model))
