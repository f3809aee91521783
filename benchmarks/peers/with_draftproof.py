"""Draftproof in peers.py: one target, an engine over it for each drafter and size of tree, depth and rule set per request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count

from crew import AUTO
from worker import Accepted, Generate, Job, Told, in_turn, main

from draftproof import Engine, LoadConfig, Sampling
from draftproof.models.load import load_target


def load(job: Job) -> Generate:
    settings = LoadConfig(device="cpu", threads=job["threads"], cache_tokens=16_384)      # in the type that the load chooses
    target = load_target(job["target"], replace(
        settings, cache_bits=job["cache_bits"], quantization=None if job["bits"] == 16 else f"int{job['bits']}"))
    runs = count()

    @cache
    def engine(drafter: str, tree: int) -> Engine:
        spec = drafter.replace("model", f"model:{job['draft']}").replace("eagle3", f"eagle3:{job.get('head')}")
        return Engine(target, spec, tree=tree or None, load=settings)

    def generate(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        sampling = Sampling(temperature=request["temperature"], max_tokens=request["max_tokens"], ignore_eos=True)
        depth = "auto" if request["depth"] == AUTO else request["depth"]
        speculation = {"depth": depth, "rule": request["rule"]} if depth else {"drafter": "none"}
        asked = engine(request["drafter"], request["tree"])
        handles, places = {}, {}

        def begin(text: int) -> None:
            tenant = f"run {next(runs)}"                                                               # no prefix is reused
            own = replace(sampling, seed=request["seeds"][text])
            handles[text] = asked.submit(request["prompts"][text], own, tenant=tenant, speculation=speculation)[0]
            places[handles[text].id] = text

        def step() -> list[int]:
            events = asked.step()
            for name, tokens in Counter(event.request for event in events).items():
                told(places[name], tokens)
            return [places[event.request] for event in events if event.finish]

        in_turn(request, told, begin, step)
        done = [handles[text].completion() for text in sorted(handles)]
        return [list(out.token_ids) for out in done], sum(int(out.metrics["accepted"]) for out in done)

    return generate


if __name__ == "__main__":
    main(load, ("draftproof", "torch"))
