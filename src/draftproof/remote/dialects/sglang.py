"""SGLang: flags. Its `num-draft-tokens` counts the root's slot: K + 1 for a chain of K."""

from __future__ import annotations

from ...errors import OptionError
from ..plan import Exported, Plan, compact, one_drafter, refuse

VERSION = "SGLang 0.5.23"
ABLE = "none, ngram, model, eagle, eagle2, eagle3, mtp, dflash, dflash2, dspark, domino"
ALGORITHMS = {"model": "STANDALONE", "eagle": "EAGLE", "eagle2": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
BLOCKS = {"dflash": "DFLASH", "dflash2": "DFLASH", "domino": "DFLASH", "dspark": "DSPARK"}
ADAPTIVE = ("eagle", "eagle2", "eagle3")
BRANCHES = 4            # children per node of a tree, SGLang's own choice for EAGLE on Llama


def export(plan: Plan) -> Exported:
    """The command line and, for a schedule, its file. Raises OptionError for a drafter that SGLang does not have."""
    one_drafter(plan, "SGLang")
    start = ("python", "-m", "sglang.launch_server", "--model-path", plan.target)
    if plan.name == "none" or plan.k == 0:
        return Exported("sglang", VERSION, (*start, *plan.extra))
    flags, notes, files = _method(plan), list(plan.general_notes()), {}
    chain = not plan.tree
    if plan.rule == "block" and chain:
        flags += ["--speculative-use-block-verification"]
    elif plan.rule in ("match", "ratio") and chain and plan.name != "ngram":
        flags += ["--speculative-use-rejection-sampling"]
    elif plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: SGLang's lossy thresholds are others; export match, ratio or block")
    elif plan.rule == "block":
        notes.append("rule block in a tree: SGLang verifies blocks in chains only; its tree rule is written")
    if plan.schedule is not None and (plan.name not in ADAPTIVE or plan.tree):
        notes.append("a depth by batch size: SGLang's adaptive mode is for chains of eagle and eagle3 only; the largest depth is written")
    elif plan.schedule is not None:
        steps = {str(start): {"candidate_steps": [depth]} for start, depth in plan.schedule.steps}
        files["adaptive.json"] = compact(steps) + "\n"
        flags += ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
    if "--max-running-requests" not in plan.extra:
        notes.append("SGLang lowers --max-running-requests to 48 with speculation unless it is given")
    return Exported("sglang", VERSION, (*start, *flags, *plan.extra), files, tuple(notes + _lost(plan)))


def _method(plan: Plan) -> list[str]:
    if plan.name == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(plan.k + 1),
                "--speculative-ngram-max-trie-depth", str(max(plan.k + plan.drafter.options.get("max", 4), 2))]
    if plan.name in BLOCKS:
        algorithm = BLOCKS[plan.name]
        return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", plan.path(),
                f"--speculative-{algorithm.lower()}-block-size", str(plan.k + (algorithm == "DFLASH"))]
    if plan.name not in ALGORITHMS:
        near = {"suffix": "NGRAM keeps a tree of past text, too: export ngram", "pard": "export the draft model as model",
                "assistant": "its NEXTN runs Gemma 4's: export mtp:PATH"}
        raise refuse(plan, "SGLang", ABLE, near.get(plan.name, ""))
    weights = [] if plan.name == "mtp" and plan.drafter.path is None else ["--speculative-draft-model-path", plan.path()]
    branches, tokens = (BRANCHES, plan.tree + 1) if plan.tree else (1, plan.k + 1)
    return ["--speculative-algorithm", ALGORITHMS[plan.name], *weights, "--speculative-num-steps", str(plan.k),
            "--speculative-eagle-topk", str(branches), "--speculative-num-draft-tokens", str(tokens)]


def _lost(plan: Plan) -> list[str]:
    notes = []
    if plan.name == "ngram":
        notes.append("n-grams: SGLang matches in a tree over past texts; max bounds the tree's depth with K")
    if plan.name == "eagle2" and not plan.tree:
        notes.append("eagle2 without a tree is written as a chain; give --tree for EAGLE's dynamic tree")
    if plan.tree and plan.name not in ("ngram", *BLOCKS):
        notes.append(f"a tree of {plan.tree} nodes: SGLang also fixes the children per node, {BRANCHES} is written")
    if plan.tree and plan.name in ("ngram", *BLOCKS):
        notes.append(f"tree {plan.tree}: the number of nodes is not ours to choose with this drafter; the depth is kept")
    if BLOCKS.get(plan.name) == "DFLASH":
        notes.append("DFLASH's block holds the root and K guesses: K + 1")
    return notes
