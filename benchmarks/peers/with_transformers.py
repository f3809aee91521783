"""transformers in peers.py: `generate` plain, and with `assistant_model` at a constant number of guesses. Several users are a batch, padded
on the left, which ends before the next begins; guessing is for one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from worker import Accepted, Generate, Job, Told, main


class Teller(BaseStreamer):
    """Is given the prompts of some texts, then what comes: a token for each, or several of one."""

    def __init__(self, told: Told, texts: range) -> None:
        self.told, self.texts, self.begun = told, texts, False

    def put(self, value: torch.Tensor) -> None:
        for text in self.texts if self.begun else ():
            self.told(text, value.numel() // len(self.texts))
        self.begun = True

    def end(self) -> None:
        """There is nothing to put away."""


def load(job: Job) -> Generate:
    torch.set_num_threads(job["threads"])
    model, assistant = (AutoModelForCausalLM.from_pretrained(job[name], dtype=torch.bfloat16).eval() for name in ("target", "draft"))
    for each in (model, assistant):
        each.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)       # no end token: nothing to stop at
    passes = [0]
    model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def generate(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        more: dict[str, Any] = {}
        if request["depth"]:
            more["assistant_model"], guesses = assistant, assistant.generation_config
            guesses.num_assistant_tokens, guesses.num_assistant_tokens_schedule = request["depth"], "constant"
            guesses.assistant_confidence_threshold = 0.0
        if request["temperature"]:
            more.update(do_sample=True, temperature=request["temperature"], top_k=0, top_p=1.0)
        prompts, users, new = request["prompts"], request["users"], []
        passes[0] = 0
        for first in range(0, len(prompts), users):
            some = range(first, min(first + users, len(prompts)))
            longest = max(len(prompts[text]) for text in some)
            ids, there = (torch.tensor([[0] * (longest - len(row)) + row for row in rows])
                          for rows in zip(*((prompts[text], [1] * len(prompts[text])) for text in some), strict=True))
            torch.manual_seed(request["seeds"][first])
            for text in some:
                told.begun(text)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=there, max_new_tokens=request["max_tokens"], streamer=Teller(told, some), **more)
            new += out[:, longest:].tolist()
        return new, sum(map(len, new)) - passes[0] if users == 1 else None

    return generate


if __name__ == "__main__":
    main(load, ("transformers", "torch"))
