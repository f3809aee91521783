"""transformers in peers.py: `generate` plain, and with `assistant_model` at a constant number of guesses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from worker import Accepted, Arrived, Generate, Job, main


class Told(BaseStreamer):
    """Is given the prompt, then what comes."""

    def __init__(self, arrived: Arrived) -> None:
        self.arrived, self.begun = arrived, False

    def put(self, value: torch.Tensor) -> None:
        if self.begun:
            self.arrived(value.numel())
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

    def generate(request: Job, arrived: Arrived) -> tuple[list[int], Accepted]:
        more: dict[str, Any] = {}
        if request["depth"]:
            more["assistant_model"], guesses = assistant, assistant.generation_config
            guesses.num_assistant_tokens, guesses.num_assistant_tokens_schedule = request["depth"], "constant"
            guesses.assistant_confidence_threshold = 0.0
        if request["temperature"]:
            more.update(do_sample=True, temperature=request["temperature"], top_k=0, top_p=1.0)
        ids = torch.tensor([request["prompt_ids"]])
        torch.manual_seed(request["seed"])
        passes[0] = 0
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_tokens"], streamer=Told(arrived),
                                 **more)
        new = out[0, ids.shape[1]:].tolist()
        return new, len(new) - passes[0]

    return generate


if __name__ == "__main__":
    main(load, ("transformers", "torch"))
