"""A small causal language model to be trained: a transformers model behind three functions, so that nobody else imports it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ..errors import LoadError
from .folder import configuration, with_caps
from .heads.files import share

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model",
                   "added_tokens.json", "chat_template.jinja", "generation_config.json")


class CausalLM:
    """module learns in float32 and is saved in the precision it came in; its folder's tokenizer goes with it."""

    def __init__(self, module: Any, source: Path | None = None, saved_as: torch.dtype = torch.float32) -> None:
        self.module = module
        self.source, self.saved_as = source, saved_as
        self.config: Any = self.module.config
        self.vocab_size = int(self.config.get_text_config().vocab_size)

    @classmethod
    def read(cls, folder: str | Path, device: torch.device | str = "cpu") -> Self:
        """Raises LoadError where the folder holds no decoder with safetensors weights."""
        try:
            config = with_caps(configuration(folder))
            model = AutoModelForCausalLM.from_pretrained(str(folder), config=config, use_safetensors=True, dtype="auto")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise LoadError(f"{folder}: no language model to train ({str(error).splitlines()[0][:200]}); expected a folder with "
                            "config.json and safetensors weights") from error
        saved_as = model.dtype
        return cls(model.to(device=device, dtype=torch.float32), Path(folder), saved_as)

    @classmethod
    def fresh(cls, device: torch.device | str = "cpu", **config: Any) -> Self:
        """Random weights; config: `model_type` and the fields of that family."""
        fields = dict(config)
        made = with_caps(AutoConfig.for_model(fields.pop("model_type", "llama"), **fields))
        return cls(AutoModelForCausalLM.from_config(made, dtype=torch.float32).to(device))

    def logits(self, ids: Tensor) -> Tensor:
        """[n, V] behind every token of a text [n]."""
        found: Tensor = self.module(input_ids=ids[None], use_cache=False).logits[0]
        return found

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of its layers; empty where the config names none."""
        return frozenset(getattr(self.config.get_text_config(), "layer_types", None) or ())

    def require_rows(self) -> None:
        """Raises LoadError unless `logits_of_rows` can be had, and masks be taken back when it is served: a decoder of attention alone."""
        stateful = self.module._is_stateful or not self.kinds <= {"full_attention", "sliding_attention"}
        if stateful or not self.module._supports_attention_backend:
            found = "keeps a state that no mask can be taken back from" if stateful else "has an attention that takes no mask from outside"
            raise LoadError(f"{self.source or 'the model'} ({self.config.model_type}) {found}; expected a language model of attention "
                            "alone, such as a Llama or a Qwen3")

    def logits_of_rows(self, ids: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """[n, V] of tokens ids [n] at positions [n]; visible bool [n, n]: which rows each row may read, of which layers that slide read
        those in their window."""
        window = getattr(self.config.get_text_config(), "sliding_window", None)
        masks = {"full_attention": _bias(visible)}
        if window and self.kinds != {"full_attention"}:
            masks["sliding_attention"] = _bias(visible & (positions[:, None] - positions[None] < window))
        mask = masks if len(self.kinds) > 1 else list(masks.values())[-1]     # where the config names no kinds, all layers slide
        out = self.module(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False)
        found: Tensor = out.logits[0]
        return found

    def save(self, folder: str | Path, **fields: Any) -> None:
        """The model as transformers publishes it, with `fields` in its config."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, value in fields.items():
            setattr(self.config, name, value)
        module = self.module if self.saved_as == torch.float32 else copy.deepcopy(self.module).to(self.saved_as)     # ties stay ties
        module.save_pretrained(target)
        for file in target.glob("*.safetensors"):
            share(file)
        for name in TOKENIZER_FILES:
            if self.source is not None and (self.source / name).is_file():
                shutil.copyfile(self.source / name, target / name)


def _bias(visible: Tensor) -> Tensor:
    """What is added to scores: [1, 1, n, n]."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
