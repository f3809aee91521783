"""Put the trained demo models into the package.

    python recipes/demo/export.py WORK [--out src/draftproof/weights] [--log WORK]

Copies WORK/target and WORK/draft (safetensors, bfloat16), each with the tokenizer (fast, no BOS, the chat template of
`corpus.chat`) and a generation config; picks held-out prompts of every class; writes MODEL_CARD.md. The card's steps and
losses are the last lines of WORK/target.log and WORK/draft.log, as train.py printed them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import ASSISTANT, END, PACKAGES, STOP, USER, VOCABULARY
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODELS = ("target", "draft")
CLASSES = ("code", "prose", "data")
PER_CLASS, LONGEST, SHORTEST = 24, 300, 64  # prompts of a class; tokens of a prompt; tokens of its answer
FILE_LIMIT, TOTAL_LIMIT = 45_000_000, 96_000_000      # bytes

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}" + ASSISTANT + "{{ message['content'] }}" + STOP +
    "{%- elif message['role'] == 'user' -%}" + USER + "{{ message['content'] }}"
    "{%- else -%}{{ raise_exception('the demo model knows the roles user and assistant only, not ' + message['role']) }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + ASSISTANT + "{%- endif -%}"
)


def check_tokenizer(work: Path) -> Tokenizer:
    backend = Tokenizer.from_file(str(work / "tokenizer.json"))
    ids = [backend.token_to_id(t) for t in (END, USER, ASSISTANT, STOP)]
    if ids != [0, 1, 2, 3] or backend.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"{work}/tokenizer.json: special tokens {ids}, vocabulary {backend.get_vocab_size()}; "
                         f"expected [0, 1, 2, 3] and {VOCABULARY}")
    return backend


def export_tokenizer(backend: Tokenizer, context: int, folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, additional_special_tokens=[USER, ASSISTANT, STOP],
        model_max_length=context, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"                 # the name that every release and every engine knows
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")
    again = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return 'naïve' + x  # ✓\n"
    if not again.is_fast or again.encode(text) != backend.encode(text).ids or again.decode(again.encode(text)) != text:
        raise SystemExit(f"{folder}: the tokenizer does not read back as it was written")
    chat = again.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False)
    if chat != f"{USER}hello{ASSISTANT}":
        raise SystemExit(f"{folder}: the chat template gives {chat!r}; expected what corpus.chat writes")


def export_model(source: Path, folder: Path, backend: Tokenizer) -> int:
    """Copies one model; returns its parameters."""
    weights = sorted(source.glob("*.safetensors"))
    if len(weights) != 1:
        raise SystemExit(f"{source}: {len(weights)} safetensors files; expected one (run train.py to its end)")
    config = LlamaConfig.from_pretrained(source)
    if config.vocab_size != VOCABULARY:
        raise SystemExit(f"{source}: vocabulary {config.vocab_size}; expected {VOCABULARY}")
    parameters = 0
    with safe_open(weights[0], "pt") as file:
        for key in file.keys():
            tensor: Any = file.get_tensor(key)
            if tensor.dtype != torch.bfloat16 or not tensor.isfinite().all():
                raise SystemExit(f"{weights[0]}: {key} is {tensor.dtype} or not finite; expected finite bfloat16")
            parameters += tensor.numel()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights[0], folder / "model.safetensors")
    config.eos_token_id, config.pad_token_id = [0, 3], 0
    config.save_pretrained(folder)
    GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=[0, 3], pad_token_id=0).save_pretrained(folder)
    export_tokenizer(backend, config.max_position_embeddings, folder)
    return parameters


def answers_at_length(target: LlamaForCausalLM, ids: list[int]) -> bool:
    """Whether plain greedy decoding writes SHORTEST tokens before it ends the text."""
    x = torch.tensor([ids])
    greedy = {"max_new_tokens": SHORTEST, "do_sample": False, "eos_token_id": [0, 3], "pad_token_id": 0}
    out = target.generate(x, attention_mask=torch.ones_like(x), **greedy)
    return out.shape[1] - len(ids) == SHORTEST


def export_prompts(work: Path, out: Path, backend: Tokenizer) -> dict[str, int]:
    """At most PER_CLASS prompts of each class, none longer than LONGEST tokens, at most two from one file; in the classes' order.

    Only prompts that the target answers at length (SHORTEST tokens of plain greedy text) can show a difference in speed.
    """
    target = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()
    chosen: dict[str, list[dict[str, str]]] = {c: [] for c in CLASSES}
    used: dict[tuple[str, str], int] = {}
    for line in (work / "prompts.jsonl").read_text("utf-8").splitlines():
        prompt = json.loads(line)
        kind, source = prompt["class"], (prompt["class"], prompt["source"])
        ids = backend.encode(prompt["prompt"]).ids
        if len(chosen[kind]) < PER_CLASS and used.get(source, 0) < 2 and 8 <= len(ids) <= LONGEST and answers_at_length(target, ids):
            used[source] = used.get(source, 0) + 1
            chosen[kind].append({"class": kind, "prompt": prompt["prompt"]})
    if not all(chosen.values()):
        raise SystemExit(f"{work}/prompts.jsonl: no prompt of class {[c for c in CLASSES if not chosen[c]]}")
    with open(out / "prompts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(p, ensure_ascii=False) + "\n" for c in CLASSES for p in chosen[c])
    return {c: len(p) for c, p in chosen.items()}


def training_facts(logs: Path, name: str) -> dict[str, Any]:
    """The JSON line that train.py prints at its end; empty if there is no log."""
    path = logs / f"{name}.log"
    lines = re.findall(r"^\{.*\}$", path.read_text("utf-8"), re.MULTILINE) if path.exists() else []
    facts: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return facts


CARD = """# The built-in demo models

Two small Llama-architecture models with one byte-level BPE tokenizer of {vocabulary} tokens, made so that `draftproof demo`
and the tests have a real, trained pair on any machine. bfloat16 safetensors. Made end to end by `recipes/demo`.

| model | parameters | shape (hidden × layers, heads/kv heads, intermediate) | steps | tokens seen | training loss | held-out loss |
|---|---|---|---|---|---|---|
{rows}

Losses are cross entropy in nats per token (guessing blindly is {blind:.2f}). The held-out loss is over 64 windows of 512
tokens of files that no training text and no exercise came from. The draft model was distilled: half cross entropy on the
text, half KL divergence from the target. Input and output embeddings are tied. Context: {context} positions, trained on 512.{note}

**Corpus.** {train:.1f} M tokens: Python files of the standard library of CPython and of these installed packages:
{packages}.
Besides whole files, exercises derived from them by rule: a docstring as a request and its function as the answer, renaming an
identifier, and records rewritten between JSON lines, CSV and Python literals. The corpus itself is not part of the project.
One file in 64 is held out ({heldout:.2f} M tokens); `prompts.jsonl` ({prompts}) comes from those alone, chosen
among the prompts that the target answers with {shortest} tokens or more of plain greedy text.

**Template.** `{user}request{assistant}answer{stop}`; `{end}` ends a document. Both end a text (ids 3 and 0). No BOS.

**What they cannot do.** They write text that looks like Python, often in loops at temperature 0. They copy short names and
phrases but not reliably whole records, do not reason, know no facts, follow no instruction and speak no language but the
corpus's; their code is not
to be run. They may repeat passages of the corpus, which is under the licences of CPython and of the packages named. Use them
to see and to test speculative decoding, for nothing else.
"""


def card_row(name: str, config: Any, parameters: int, facts: dict[str, Any]) -> str:
    unknown = "not logged"
    seen = f"{facts['tokens'] / 1e6:.1f} M" if "tokens" in facts else unknown
    shape = (f"{config.hidden_size} × {config.num_hidden_layers} layers, {config.num_attention_heads}/{config.num_key_value_heads} heads, "
             f"{config.intermediate_size}")
    cells = (name, f"{parameters / 1e6:.2f} M", shape,
             facts.get("steps", unknown), seen, facts.get("train_loss", unknown), facts.get("heldout_loss", unknown))
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "src" / "draftproof" / "weights")
    parser.add_argument("--log", type=Path, help="folder of target.log and draft.log; default: WORK")
    parser.add_argument("--note", default="", help="a remark on how the training really went, for the card")
    args = parser.parse_args()
    backend = check_tokenizer(args.work)
    args.out.mkdir(parents=True, exist_ok=True)
    parameters = {name: export_model(args.work / name, args.out / name, backend) for name in MODELS}
    prompts = export_prompts(args.work, args.out, backend)
    shapes = {name: LlamaConfig.from_pretrained(args.out / name) for name in MODELS}
    tokens = {name: (args.work / f"{name}.bin").stat().st_size / 2e6 for name in ("train", "heldout")}      # uint16 ids, in millions
    facts = {name: training_facts(args.log or args.work, name) for name in MODELS}
    card = CARD.format(
        vocabulary=VOCABULARY, blind=math.log(VOCABULARY), context=shapes["target"].max_position_embeddings, packages=", ".join(PACKAGES),
        rows="\n".join(card_row(n, shapes[n], parameters[n], facts[n]) for n in MODELS),
        prompts=", ".join(f"{n} {c}" for c, n in prompts.items()),
        user=USER, assistant=ASSISTANT, stop=STOP, end=END, shortest=SHORTEST, note=args.note and f" {args.note}", **tokens)
    (args.out / "MODEL_CARD.md").write_text(card, "utf-8")
    sizes = [f.stat().st_size for f in args.out.rglob("*") if f.is_file()]
    if max(sizes) > FILE_LIMIT or sum(sizes) > TOTAL_LIMIT:
        raise SystemExit(f"{args.out}: largest file {max(sizes)} bytes, all {sum(sizes)}; expected at most {FILE_LIMIT} and {TOTAL_LIMIT}")
    print(json.dumps({"out": str(args.out), "parameters": parameters, "prompts": prompts, "bytes": sum(sizes),
                      "facts": facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
