"""Does an engine's sampled text follow the target's law, plain and guessing? The engines of peers.py, asked for many short texts.

    python benchmarks/exactness.py --work DIR                       # what is installed; models and environments are those of peers.py
    python benchmarks/exactness.py --work DIR --peers ours,openvino --texts 60 --prompts 6 --write docs/peers.md

Every arm writes --texts texts of each prompt, every one from a seed of its own, with no limit but the temperature. The law is that of the
target's very weights in float32, read along each text. Two tests over all tokens of an arm:

* Places (Rosenblatt 1952, "Remarks on a multivariate transformation"). With the law's tokens from the likeliest to the rarest, a token
  stands at u = the mass before it + v · its own mass, v uniform. Of a kept law the u are independent and uniform, whatever the texts:
  Kolmogorov's test.
* Surprise. −log p of a token less the law's entropy at its place has mean 0 and a variance that the law gives, and sums of it over a text
  are a martingale: z, their sum over its deviation, is normal. Its mean says by how many nats a token the text is too wild, or too tame.

Together they raise a false alarm for one kept law in 1,000,000; as −log p is skewed, for two where a few thousand tokens are too wild. An
engine that computes in bfloat16 keeps a law that is off by its rounding, which a few thousand tokens do not show: on the built-in pair it
moves log-probabilities by 0.02, and z by 0.03. llama.cpp, told to ignore end tokens, never draws them, where others draw and pass over
them: little in texts so short. Nothing is asked of an engine but its text, so that a wrong rule is found as well as a wrong kernel. Guesses
that never stand prove nothing, so the table says how many did. Whether speculation leaves a seed's text as it is, is another question:
`draftproof prove` asks it. (Under `match` it does, so our own rows are not independent of each other.)

Prints a table and, as the last line, JSON; exits with 3 if an arm of ours does not keep the law (another engine's is a finding), with 1
if ours was asked for and did not run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers import OWN, Arm, Broken, Crew, carry_out, of_shape, pair_options, prepared, request, shared_options, tell
from provenance import provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from draftproof.bench.statistics import normal_tail, uniform_fit
from draftproof.models.own import CACHES, cache_name

ALARM = 1e-6            # of a kept law, both tests together
TOGETHER = 20           # texts read in one pass


# What the law says of a text.

class Reader:
    """The target in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache = cache_name(self.model) or CACHES[0]

    @torch.inference_mode()
    def laws(self, prompt: Sequence[int], texts: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of every token at every place of the texts [n, length], which follow the prompt: [n · length, V], float64."""
        cache = DynamicCache()
        first = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1, **{self._cache: cache}).logits
        found = []
        for some in texts.split(TOGETHER):
            own = deepcopy(cache)
            own.batch_repeat_interleave(len(some))
            rest = self.model(some[:, :-1], use_cache=True, **{self._cache: own}).logits
            found.append(torch.cat([first.expand(len(some), -1, -1), rest], 1))
        logits = torch.cat(found).flatten(0, 1).double()
        return (logits / temperature).log_softmax(-1)


def places(laws: Tensor, tokens: Tensor, dice: torch.Generator) -> Tensor:
    """u [N] of tokens [N] under log-probabilities [N, V]; equally likely tokens stand in the order of their ids."""
    own = laws.gather(1, tokens[:, None])
    before = (laws > own) | (laws == own) & (torch.arange(laws.shape[1]) < tokens[:, None])
    share = torch.rand(tokens.shape, generator=dice, dtype=torch.float64)
    return torch.where(before, laws.exp(), 0.0).sum(1) + share * own[:, 0].exp()


def surprise(laws: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[N] each: −log p of the tokens less the entropy of their law, and the variance that the law gives it."""
    nats = -laws.gather(1, tokens[:, None])[:, 0]
    p, costs = laws.exp(), -laws.clamp(min=-1e3)          # a token of no chance adds nothing
    entropy = (p * costs).sum(1)
    return nats - entropy, (p * (costs - entropy[:, None]).square()).sum(1)


@dataclass(frozen=True, slots=True)
class Finding:
    """tokens: how many were judged; excess: mean surprise in nats a token above what the law expects, z and p_surprise of it; p_places: of
    Kolmogorov's test; stood: guesses of each text that stood, where the engine says it."""

    tokens: int
    excess: float
    z: float
    p_surprise: float
    p_places: float
    stood: float | None

    @property
    def kept(self) -> bool:
        return min(self.p_surprise, self.p_places) >= ALARM / 2

    @classmethod
    def of(cls, u: Tensor, over: Tensor, variance: Tensor, stood: float | None = None) -> Finding:
        """From `places` and `surprise` of all tokens of an arm. Where the law leaves no choice anywhere, any surprise is too much."""
        total, deviation = float(over.sum()), math.sqrt(float(variance.sum()))
        z = total / deviation if deviation else math.copysign(math.inf, total) if abs(total) > 1e-6 else 0.0
        return cls(u.numel(), total / u.numel(), z, normal_tail(z), uniform_fit(u.tolist()), stood)


# The run.

def text_of(answer: Mapping[str, Any]) -> tuple[list[int], int | None]:
    """Ids, and how many guesses stood. Raises Broken for an answer without ids."""
    text, *more = answer.get("texts") or [{}]
    ids = text.get("ids")
    if more or not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise Broken(f"an answer without token ids: {answer!r:.80}")
    return ids, answer.get("accepted")


def written(crew: Crew, arm: Arm, prompt: Sequence[int], tokens: int, temperature: float, seeds: Sequence[int],
            vocabulary: int) -> tuple[Tensor, list[int | None]]:
    """Texts [seeds, tokens], and how many guesses stood in each. Raises Broken."""
    texts = [crew.answer(arm, request(arm, prompt, tokens, temperature, seed), text_of) for seed in seeds]
    for ids, _ in texts:
        if len(ids) != tokens or not all(0 <= i < vocabulary for i in ids):
            raise Broken(f"{len(ids)} tokens, ids up to {max(ids, default=0)}; asked for {tokens} of a vocabulary of {vocabulary}")
    return torch.tensor([ids for ids, _ in texts]), [stood for _, stood in texts]


def judge(crew: Crew, reader: Reader, arm: Arm, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Finding:
    """Raises Broken."""
    dice = torch.Generator().manual_seed(args.seed)
    found: list[tuple[Tensor, ...]] = []
    stood: list[int | None] = []
    for i, prompt in enumerate(prompts):
        seeds = range(1 + i * args.texts, 1 + (i + 1) * args.texts)
        texts, more = written(crew, arm, prompt, args.tokens, args.temperature, seeds, reader.model.config.vocab_size)
        laws = reader.laws(prompt, texts, args.temperature)
        found.append((places(laws, texts.flatten(), dice), *surprise(laws, texts.flatten())))
        stood += more
    counted = [count for count in stood if count is not None] if arm.depth else []
    return Finding.of(*(torch.cat(parts) for parts in zip(*found, strict=True)), stood=sum(counted) / len(counted) if counted else None)


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    facts, there = provenance(), prepared(args, work)
    reader, arms, rows = Reader(there.sources["target"]), there.arms(args.depths), []
    not_run = dict(there.missing)
    with there.crew(args, arms, work) as crew:
        for arm in arms:
            try:
                found = judge(crew, reader, arm, there.prompts, args)
            except Broken as error:
                not_run[str(arm)] = str(error)
                tell(f"{arm}: {error}")
                continue
            tell(f"{arm}: {found.excess:+.3f} nats a token, {'kept' if found.kept else 'NOT kept'}")
            rows.append({"peer": arm.peer, "depth": arm.depth, **asdict(found), "kept": found.kept})
    return {**facts, "threads": args.threads, "asked": args.peers, "prompt_tokens": [len(p) for p in there.prompts], "texts": args.texts,
            "tokens": args.tokens, "temperature": args.temperature, "bits": args.bits, "peers": crew.versions, "alarm": ALARM, "rows": rows,
            "not_run": not_run}


def page(result: Mapping[str, Any]) -> str:
    lines = [f"Made by `{result['command']}` on {result['machine']['cpu']}, {result['threads']} threads, {result['date']}, revision "
             f"{result['versions']['revision']}: {result['texts']} texts of {result['tokens']} tokens for each of "
             f"{len(result['prompt_tokens'])} prompts, temperature {result['temperature']:g}, weights of {result['bits']} bits. A "
             f"kept law is called broken once in {1 / result['alarm']:,.0f} arms.", "",
             "| engine | tokens | guesses that stood, a text | surprise above the law's, nats a token | z | p | p of places | law kept |",
             "|---" * 8 + "|"]
    for row in result["rows"]:
        stood = "–" if row["stood"] is None else f"{row['stood']:.1f}"
        lines.append(f"| {Arm(row['peer'], row['depth'])} | {row['tokens']:,} | {stood} | {row['excess']:+.3f} | {row['z']:+.1f} | "
                     f"{row['p_surprise']:.1g} | {row['p_places']:.1g} | {'yes' if row['kept'] else '**NO**'} |")
    return "\n".join([*lines, *(f"\n{name}: not run: {why}" for name, why in result["not_run"].items())])


def verdict(result: Mapping[str, Any]) -> int:
    own = [row for row in result["rows"] if row["peer"] in OWN]
    if not own and any(name in OWN for name in result["asked"]):
        return 1
    return 0 if all(row["kept"] for row in own) else 3


def main() -> int:
    args = arguments()
    return carry_out(args, of_shape("exactness", args), run, page, verdict)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared_options(parser, prompts=6, tokens=12)
    pair_options(parser, depths=(4,))
    parser.add_argument("--texts", type=int, default=60, help="of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="above 0")
    args = parser.parse_args()
    if args.temperature <= 0 or args.texts < 1 or args.tokens < 2:
        parser.error(f"--temperature {args.temperature}, --texts {args.texts}, --tokens {args.tokens}; expected a temperature above 0 "
                     "and a text of at least 2 tokens")
    return args


if __name__ == "__main__":
    sys.exit(main())
