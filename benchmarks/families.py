"""Models of other families than Llama's, plain: ours beside the engines one would use instead, in one interleaved run.

    python benchmarks/families.py --work DIR                        # what is installed; environments are those of peers.py
    python benchmarks/families.py --work DIR --families lfm2 --peers ours,llamacpp --write docs/peers.md
    python benchmarks/families.py --work DIR --families llama --long 8000 --peers ours,ours+bytes,openvino       # behind long texts

What a pass costs does not depend on what a model knows: each family's model has random weights in bfloat16, half a milliard of them, in
the proportions of a published one, and the tokenizer of the built-in target. It is converted for each engine as in peers.py and stays in
DIR. Prompt by prompt every engine writes greedily, in an order drawn anew. Rates, the floor and "best" are those of peers.py; texts of
random weights hang on roundings, so they are not compared. What cannot run is named with its reason.

Prints a table and, as the last line, JSON; exits with 3 if ours is slower than its goal in a family, with 1 if it did not run in one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))       # what stands there is no package: peers.py has its name

import torch
from memory import Memory
from pair import pass_bytes
from peers import OURS, PEERS, Arm, carry_out, cell, converted_for_each, ending, goals, limits_of, listed, measure, shared_options, verdict
from provenance import provenance
from ratios import BRACKETS, shown
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftproof.commands.console import counted
from draftproof.models.load import WEIGHTS

VOCABULARY = 32_000
PLAIN = [name for name, peer in PEERS.items() if peer.plain]


def kinds(layers: int, every: int, last: str, others: str) -> list[str]:
    """Of layers of which each `every`th is another."""
    return [last if layer % every == every - 1 else others for layer in range(layers)]


FAMILIES: dict[str, dict[str, Any]] = {         # what transformers' configuration of a family is told
    "llama": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16, "num_attention_heads": 24, "num_key_value_heads": 12,
              "max_position_embeddings": 40_960},               # for --long
    "qwen3_5_text": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
                     "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
                     "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": True},
    "granitemoehybrid": {"hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
                         "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
                         "position_embedding_type": "nope", "layer_types": kinds(16, 8, "attention", "mamba"), "tie_word_embeddings": True},
    "lfm2": {"hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 24, "num_key_value_heads": 8,
             "intermediate_size": 6912, "layer_types": kinds(16, 3, "full_attention", "conv"), "tie_word_embeddings": True,
             "block_dim": 1536, "conv_dim": 1536},              # which vLLM reads
    "gemma3_text": {"hidden_size": 1152, "num_hidden_layers": 20, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                    "intermediate_size": 6912, "sliding_window": 512,
                    "layer_types": kinds(20, 6, "full_attention", "sliding_attention")},
    "gemma4_text": {"hidden_size": 1536, "num_hidden_layers": 15, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
                    "global_head_dim": 512, "intermediate_size": 6144, "hidden_size_per_layer_input": 256,
                    "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 10, "sliding_window": 512,
                    "layer_types": kinds(15, 5, "full_attention", "sliding_attention"), "use_double_wide_mlp": False},
    "qwen3_moe": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
                  "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True,
                  "tie_word_embeddings": True},
    "gpt2": {"n_embd": 1280, "n_layer": 24, "n_head": 20, "n_ctx": 4096},        # which llama.cpp reads
    "opt": {"hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 24, "ffn_dim": 6144, "word_embed_proj_dim": 1536},
    "gemma3n_text": {"hidden_size": 1536, "num_hidden_layers": 15, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
                     "intermediate_size": 4608, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCABULARY,
                     "num_kv_shared_layers": 10, "sliding_window": 512, "laurel_rank": 64,
                     "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 10,
                     "layer_types": kinds(15, 5, "full_attention", "sliding_attention")},
}


CHAOTIC = {"gemma3n_text"}              # of whose usual random weights bfloat16 makes other logits with every order of a sum


def calm(model: Any) -> None:
    """Weights that keep the size of what they multiply, and queries that make no sharp law of scores."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "q_norm" in name:
                parameter.mul_(0.3)


def random_model(family: str, folder: Path, seed: int) -> Path:
    """The folder of a model of this family; made unless it is there already."""
    note, key = folder / "random.txt", repr((FAMILIES[family], VOCABULARY, seed, family in CHAOTIC))
    if not note.exists() or note.read_text() != key:
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{
            "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
            **FAMILIES[family]})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if family in CHAOTIC:
            calm(model)
        model.save_pretrained(folder)
        told = folder / "config.json"           # kinds of layers by the names that are published, which are not those of newest versions
        told.write_text(json.dumps({**json.loads(told.read_text("utf-8")), **FAMILIES[family]}, indent=2))
        words = AutoTokenizer.from_pretrained(WEIGHTS / "target")
        words.add_tokens([f"<{number}>" for number in range(len(words), VOCABULARY)])       # some converters cut what has no word
        words.save_pretrained(folder)
        note.write_text(key)
    return folder


def measured(family: str, args: argparse.Namespace, work: Path, memory: Memory) -> dict[str, Any]:
    """One family's arms; in the words of peers.py."""
    folder = random_model(family, work / family / "target", args.seed)
    asked = {name: replace(PEERS[name], guesses=False) for name in args.peers}
    there = converted_for_each(args, {"target": folder, "draft": WEIGHTS / "draft"}, work / family, asked)
    size = pass_bytes(folder) * args.bits // 16
    with there.crew(args, there.arms(()), work / family) as crew:
        runs, reads = measure(crew, there.prompts, [0.0], args.repeats, args.tokens, args.seed, memory)
    limits = limits_of(reads, size)
    order = sorted(runs, key=lambda key: list(there.peers).index(key[1].peer))
    found = [goal for goal in goals(runs, limits, args.bits) if goal["over"] == str(Arm(OURS, 0))]
    return {"family": family, "pass_bytes": size, "prompt_tokens": [len(prompt) for prompt in there.prompts],
            "read_gb_per_s": median(read for by_prompt in reads.values() for each in by_prompt for read in each) if reads else None,
            "not_run": {f"{family}, {name}": why for name, why in {
                **there.missing, **{arm.peer: why for arm, why in sorted(crew.broken.items())}}.items()},
            "peers": crew.versions, "cells": [cell(runs, key, limits) for key in order],
            "goals": [{**goal, "goal": f"{family}: {goal['goal']}"} for goal in found]}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    facts, memory = provenance(), Memory()
    found = [measured(family, args, work, memory) for family in args.families]
    return {**facts, "threads": args.threads, "tokens": args.tokens, "repeats": args.repeats, "bits": args.bits, "families": found,
            "not_run": {name: why for each in found for name, why in each["not_run"].items()},
            "goals": [goal for each in found for goal in each["goals"]]}


def page(result: Mapping[str, Any]) -> str:
    lengths = [length for each in result["families"] for length in each["prompt_tokens"]]
    lines = [f"Made by `{result['command']}` on {result['machine']['cpu']}, {result['threads']} threads, {result['date']}, revision "
             f"{result['versions']['revision']}: {counted(len(result['families'][0]['prompt_tokens']), 'prompt')} of {min(lengths)} to "
             f"{max(lengths)} tokens, {counted(result['repeats'], 'repeat')}, {result['tokens']} tokens, {result['bits']} bits a weight. "
             f"Ratios are paired medians {BRACKETS}.", "",
             "| family | engine | tokens/s | ÷ limit | ÷ ours | ms to the first token | ÷ ours |", "|---" * 7 + "|"]
    for each in result["families"]:
        for row in each["cells"]:
            words = [each["family"], row["peer"], f"{row['tokens_per_s']['median']:.1f}", shown(row["of_limit"]), shown(row["over_off"]),
                     f"{row['first_ms']:.0f}", shown(row["first_over_off"])]
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, *ending(result)])


def worst(result: Mapping[str, Any]) -> int:
    """1 if ours is missing in a family, 3 if it misses a goal."""
    codes = [verdict(each) for each in result["families"]]
    return 1 if 1 in codes else max(codes)


def arguments() -> argparse.Namespace:
    def known(name: str) -> str:
        if name not in FAMILIES:
            raise argparse.ArgumentTypeError(f"{name!r}: expected one of {', '.join(FAMILIES)}")
        return name

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared_options(parser, prompts=6, tokens=64)
    parser.set_defaults(peers=PLAIN)
    parser.add_argument("--families", type=listed(known), default=list(FAMILIES), help=",".join(FAMILIES))
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if beside := [name for name in args.peers if name not in PLAIN]:
        parser.error(f"--peers {','.join(beside)}: these guess; expected some of {', '.join(PLAIN)}")
    return args


def main() -> int:
    return carry_out(arguments(), "families", run, page, worst)


if __name__ == "__main__":
    sys.exit(main())
