"""Draftproof in peers.py: one target, an engine over it for each drafter and size of tree, depth and rule set per request."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

from crew import AUTO
from worker import Accepted, Arrived, Generate, Job, main

from draftproof import Engine, LoadConfig, Sampling
from draftproof.models.load import load_target


def load(job: Job) -> Generate:
    settings = LoadConfig(device="cpu", threads=job["threads"], cache_tokens=16_384)      # in the type that the load chooses
    target = load_target(job["target"], replace(settings, quantization=None if job["bits"] == 16 else f"int{job['bits']}"))
    runs = count()

    @cache
    def engine(drafter: str, tree: int) -> Engine:
        spec = drafter.replace("model", f"model:{job['draft']}").replace("eagle3", f"eagle3:{job.get('head')}")
        return Engine(target, spec, tree=tree or None, load=settings)

    def generate(request: Job, arrived: Arrived) -> tuple[list[int], Accepted]:
        sampling = Sampling(temperature=request["temperature"], seed=request["seed"], max_tokens=request["max_tokens"], ignore_eos=True)
        depth = "auto" if request["depth"] == AUTO else request["depth"]
        speculation = {"depth": depth, "rule": request["rule"]} if depth else {"drafter": "none"}
        asked = engine(request["drafter"], request["tree"])
        tenant = f"run {next(runs)}"                                                                   # no prefix is reused
        handle = asked.submit(request["prompt_ids"], sampling, tenant=tenant, speculation=speculation)[0]
        while not handle.done:
            arrived(len(asked.step()))
        out = handle.completion()
        return list(out.token_ids), int(out.metrics["accepted"])

    return generate


if __name__ == "__main__":
    main(load, ("draftproof", "torch"))
