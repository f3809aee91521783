"""transformers' own generation, plain and assisted, as something to be put to the proof: its texts, and its logits at any place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..config import LoadConfig
from ..errors import Failure, first_line
from .folder import context_of, end_ids, read_config, read_tokenizer, saved_dtype
from .load import _device, _dtype, _load_model, builtin
from .own import cache_name

LOOKED_UP = 10          # tokens of prompt lookup where no depth is asked for
WIDE = 6                # rows of a pass that scores five guesses


class TransformersPeer:
    """A model as transformers loads and runs it; greedy. With `assistant`, a model's place, it drafts; None looks drafts up in the prompt.

    depth: tokens a round, always so many; None leaves transformers its own schedule.
    """

    def __init__(self, place: str | Path, assistant: str | Path | None, depth: int | None, config: LoadConfig) -> None:
        """Raises LoadError as `load_target` does."""
        self.name, self.depth = str(place), depth
        self.model, self.device, self.dtype = _load(place, config)
        self.assistant = None if assistant is None else _load(assistant, config)[0]
        self.tokenizer = read_tokenizer(place, config, {})
        self.context = context_of(self.model.config.get_text_config())
        self.ends = end_ids(self.model.generation_config, self.model.config.get_text_config(), self.tokenizer, place)
        for model in filter(None, (self.model, self.assistant)):
            model.generation_config = GenerationConfig(do_sample=False, pad_token_id=self.ends[0] if self.ends else 0,
                                                       eos_token_id=list(self.ends) or None)

    def plain(self, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> list[tuple[int, ...]]:
        """Answers, `batch` prompts side by side, the shorter ones padded on their left."""
        found: list[tuple[int, ...]] = []
        for start in range(0, len(prompts), batch):
            group = prompts[start:start + batch]
            longest = max(map(len, group))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in group], device=self.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group], device=self.device)
            found += self._answers(self._generate(ids, mask, tokens)[:, longest:])
        return found

    def assisted(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[tuple[int, ...]], int]:
        """(answers, one prompt at a time as transformers demands; tokens that took no pass of their own)."""
        found, saved = [], 0
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self.device)
            with self._passes() as count:
                out = self._generate(ids, torch.ones_like(ids), tokens, **self._drafting())
            found += self._answers(out[:, ids.shape[1]:])
            saved += len(found[-1]) - count[0]
        return found, saved

    def logits(self, text: Sequence[int]) -> Tensor:
        """Logits [ways, V] float32 after a text, by passes of the shapes that generation makes: whole; the last token after the others; the
        last `WIDE` after the others; whole, padded, beside a longer text."""
        ids = torch.tensor([list(text)], device=self.device)
        ways = [self._pass(ids)]
        for rows in (1, WIDE):
            if ids.shape[1] > rows:
                with torch.inference_mode():
                    before = self.model(input_ids=ids[:, :-rows], use_cache=True)
                    behind = {cache: before[cache]} if (cache := cache_name(self.model)) else {}
                    ways.append(self.model(input_ids=ids[:, -rows:], **behind).logits[0, -1])
        pad = torch.zeros_like(ids[:, :3])
        both = torch.cat((torch.cat((pad, ids), 1), torch.cat((ids[:, :1].expand(1, 3), ids), 1)))
        mask = torch.ones_like(both)
        mask[0, :3] = 0
        ways.append(self._pass(both, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)))
        return torch.stack([way.float().cpu() for way in ways])

    def piece(self, token: int) -> str:
        return self.tokenizer.piece(token) if self.tokenizer is not None else f"#{token}"

    def _pass(self, ids: Tensor, **more: Any) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self.model(input_ids=ids, use_cache=False, **more).logits[0, -1]
        return found

    def _drafting(self) -> dict[str, Any]:
        if self.assistant is None:
            return {"prompt_lookup_num_tokens": self.depth or LOOKED_UP}
        if self.depth is not None:
            settings = self.assistant.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = self.depth, "constant"
            settings.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.assistant}

    def _generate(self, ids: Tensor, mask: Tensor, tokens: int, **more: Any) -> Tensor:
        try:
            with torch.inference_mode():
                out: Tensor = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **more)
        except (ValueError, RuntimeError, TypeError) as error:
            why = first_line(error)
            raise Failure(f"{self.name}: transformers could not generate ({why})") from error
        return out

    def _answers(self, rows: Tensor) -> list[tuple[int, ...]]:
        """Ids up to and with the token that ended each text; what follows is padding."""
        found = []
        for row in rows.tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in self.ends), len(row))
            found.append(tuple(row[:end]))
        return found

    @contextmanager
    def _passes(self) -> Iterator[list[int]]:
        """Counts the target's passes."""
        count = [0]

        def seen(*_: Any) -> None:
            count[0] += 1

        handle = self.model.register_forward_hook(seen)
        try:
            yield count
        finally:
            handle.remove()


def assistant_place(spec: str) -> str | Path | None:
    """The drafter of a spec in transformers' terms: a model's place, or None for prompt lookup. Raises Failure for what it has not."""
    name, _, path = spec.partition(":")
    if name == "model":
        return path or builtin("draft")
    if spec == "ngram":
        return None
    raise Failure(f"drafter {spec} with transformers' own generation: it knows model:PATH (assisted generation) and ngram (prompt lookup)")


def _load(place: str | Path, config: LoadConfig) -> tuple[Any, torch.device, torch.dtype]:
    found, reasons = read_config(place, config), dict[str, str]()
    device = _device(config, reasons)
    dtype = _dtype(config, saved_dtype(place, found), device, reasons)
    ordinary = replace(config, packed=False, quantization=None)         # as transformers multiplies them
    return _load_model(place, ordinary, found, dtype, device, None, reasons).to(device).eval(), device, dtype
