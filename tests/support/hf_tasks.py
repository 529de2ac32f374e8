"""Tasks whose models are of transformers and peft, randomly initialised, with a local tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

import geo_ray

TEXT = ["the model travels", "the rows stay in their region", "regions exchange models"]
CONTEXT = 8


def local_tokenizer() -> FastTokenizer:
    """A byte-pair tokenizer trained on TEXT."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return FastTokenizer(tokenizer_object=made, eos_token="the")


class Gpt2:
    """A causal language model with tied embeddings."""

    Options = geo_ray.Options
    label_column = None

    def __init__(self, options: geo_ray.Options) -> None:
        self.columns = {"tokens": f"int32[{CONTEXT}]"}
        self.tokenizer = local_tokenizer()

    def model(self, seed: int) -> nn.Module:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=60,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=CONTEXT,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def collate(self, columns: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.array(columns["tokens"])).long().to(device)

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    def evaluate(self, model: Any, batch: torch.Tensor) -> dict[str, Any]:
        rows = float(len(batch))
        return {
            "rows": np.array([rows]),
            "nats": np.array([rows * self.loss(model, batch).item()]),
        }

    def metrics(self, stats: Any) -> dict[str, float]:
        return {"loss": float(stats["nats"][0] / stats["rows"][0])}

    def dataset(self, seed: int) -> geo_ray.Dataset:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 60, (48, CONTEXT)).astype(np.int32)
        return geo_ray.Dataset({"tokens": tokens[:40]}, {"tokens": tokens[40:]})


class Lora(Gpt2):
    """Adapters of a frozen Llama."""

    def base(self) -> nn.Module:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=60,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=CONTEXT,
            )
        )

    def model(self, seed: int) -> nn.Module:
        return get_peft_model(self.base(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
