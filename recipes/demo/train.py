"""Train the demo target, or distil the demo drafter from it. Resumes from its last checkpoint.

    python recipes/demo/train.py WORK target --steps 2000
    python recipes/demo/train.py WORK draft  --steps 900             # needs WORK/target

Llama architecture, bfloat16 autocast over float32 weights, Muon for matrices and AdamW for the rest, linear decay over
the last half. The draft model minimises a half of cross entropy on the text and a half of KL(target || draft): what
`match` accepts depends on the whole distribution, not on the best token alone.
Prints one line per 50 steps; writes WORK/<name>/ (safetensors, bfloat16) and the held-out loss at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # hidden, layers, heads, kv heads, intermediate
    "target": (384, 10, 6, 3, 1088),
    "draft": (256, 2, 4, 2, 704),
}
CONTEXT, BATCH, VOCABULARY = 512, 8, 4096


def build(name: str) -> LlamaForCausalLM:
    hidden, layers, heads, kv_heads, intermediate = SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64,
            intermediate_size=intermediate,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=[0, 3],
            pad_token_id=0,
        )
    )


def batch(ids: np.ndarray, generator: np.random.Generator) -> torch.Tensor:
    """[BATCH, CONTEXT + 1] token ids from random places."""
    starts = generator.integers(0, len(ids) - CONTEXT - 1, BATCH)
    return torch.from_numpy(np.stack([ids[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))


def loss_of(model: torch.nn.Module, x: torch.Tensor, teacher: torch.nn.Module | None) -> tuple[torch.Tensor, float]:
    """(what is minimised, cross entropy in nats per token)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x[:, :-1], use_cache=False).logits.flatten(0, 1).float()
        ce = F.cross_entropy(logits, x[:, 1:].flatten())
        if teacher is None:
            return ce, ce.item()
        with torch.no_grad():
            goal = teacher(x[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), goal, reduction="batchmean")
    return 0.5 * ce + 0.5 * kl, ce.item()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, ids: np.ndarray, windows: int = 64) -> float:
    starts = np.linspace(0, len(ids) - CONTEXT - 1, windows).astype(int)
    total = 0.0
    for s in starts:
        x = torch.from_numpy(ids[s : s + CONTEXT + 1].astype(np.int64))[None]
        with torch.autocast("cpu", torch.bfloat16):
            total += F.cross_entropy(model(x[:, :-1], use_cache=False).logits[0].float(), x[0, 1:]).item()
    return total / windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    ids, held = (np.fromfile(args.work / f"{s}.bin", dtype=np.uint16) for s in ("train", "heldout"))
    model = build(args.name)
    teacher = LlamaForCausalLM.from_pretrained(args.work / "target").eval() if args.name == "draft" else None
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint, start = args.work / f"{args.name}.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        start = state["step"]
        print(f"resumed at step {start}", flush=True)
    compiled = torch.compile(model)
    clock, ema = time.time(), None
    for step in range(start, args.steps):
        scale = min(1.0, (step + 1) / 100, 2 * (args.steps - step) / args.steps)
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = args.lr * scale
        x = batch(ids, np.random.default_rng(step))
        loss, ce = loss_of(compiled, x, teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        ema = ce if ema is None else 0.98 * ema + 0.02 * ce
        if (step + 1) % 50 == 0:
            rate = (step + 1 - start) * BATCH * CONTEXT / (time.time() - clock)
            print(f"step {step + 1}/{args.steps} loss {ema:.3f} {rate:.0f} tokens/s", flush=True)
        if (step + 1) % 250 == 0:
            torch.save(
                {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1},
                checkpoint.with_suffix(".tmp"),
            )
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    held_loss = held_out_loss(model.eval(), held)
    print(
        json.dumps(
            {
                "name": args.name,
                "steps": args.steps,
                "tokens": args.steps * BATCH * CONTEXT,
                "train_loss": round(ema or 0, 3),
                "heldout_loss": round(held_loss, 3),
            }
        )
    )
    model.to(torch.bfloat16).save_pretrained(args.work / args.name)


if __name__ == "__main__":
    main()
