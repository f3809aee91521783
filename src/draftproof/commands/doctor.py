"""draftproof doctor: what the machine is, what a load decided, and every check of a target/drafter pair."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ..config import LoadConfig
from . import options as o
from .console import emit_json, facts_lines, note, size

if TYPE_CHECKING:
    from ..drafters import Spec
    from ..drafters.vocabulary import Check
    from ..models.target import Target


@click.command(short_help="Explain the machine and check a target/drafter pair.")
@o.target_option
@click.option("--drafter", metavar="SPEC", help="A drafter to check against the target.  [default: model, beside the built-in target]")
@o.load_options
@o.json_option
def doctor(target: str | None, drafter: str | None, as_json: bool, **given: Any) -> int:
    """Explain the machine, the load of a target, and every check of a pair. Exits with 1 if something that must hold does not."""
    config = LoadConfig.of(o.pick(LoadConfig, given))
    o.check_target(target)
    o.check_drafter(drafter)
    from ..bench.machine import machine, versions
    from ..models.load import builtin, load_target

    note("loading the target and testing it …")
    loaded = load_target(target or builtin("target"), config)
    spec = drafter or ("model" if target is None else "none")
    checks = pair_checks(loaded, spec, config)
    failed = [check.name for check in checks if check.fatal and not check.ok]
    document = {"machine": machine(), "versions": versions(), "target": asdict(loaded.facts), "drafter": spec,
                "checks": [asdict(check) for check in checks], "passed": not failed}
    if as_json:
        emit_json(document)
    else:
        for line in report(document, loaded, checks, config):
            click.echo(line)
    return 1 if failed else 0


def pair_checks(target: Target, spec: str, config: LoadConfig) -> list[Check]:
    """The self-test of the target, then the checks of the pair; what is not fatal only costs acceptance or bit-equality."""
    from ..drafters import parse_spec

    parsed = parse_spec(spec)
    checks = target_checks(target, config)
    for part in parsed.parts or (parsed,):
        found = [*part_checks(target, part, config), *_made_for(target, part)]
        checks += [replace(check, name=f"{part.name}: {check.name}") for check in found] if parsed.parts else found
    return checks


def target_checks(target: Target, config: LoadConfig) -> list[Check]:
    """What the target's own files must hold, whoever guesses."""
    from ..drafters.vocabulary import Check

    words, rows = target.tokenizer, target.vocab_size
    beyond = sorted(end for end in target.eos_ids if not 0 <= end < rows)
    ends = f"the text ends at {', '.join(map(str, sorted(target.eos_ids))) or 'no token'}"
    checks = [Check("self-test", target.facts.invisible or not config.self_test, target.facts.invisible_reason, fatal=False),
              Check("tokenizer", words is not None, "present" if words else "none; prompts must be token ids", fatal=False)]
    if words is not None:
        more = "" if words.vocab_size <= rows else "; no text with the others can be read: take the model's own tokenizer"
        checks.append(Check("ids", not more, f"{words.vocab_size} of the tokenizer, {rows} rows of the model{more}"))
    return [*checks, _chat(target),
            Check("ends", not beyond, ends + (f"; {', '.join(map(str, beyond))} is beyond its {rows} tokens: correct eos_token_id"
                                              if beyond else ""), fatal=len(beyond) == len(target.eos_ids))]


def _chat(target: Target) -> Check:
    from ..drafters.vocabulary import Check

    if target.tokenizer is None or not target.tokenizer.has_chat_template:
        return Check("chat", False, "the target has no chat template", fatal=False)
    try:
        count = len(target.tokenizer.chat([{"role": "user", "content": "Hello"}]))
    except Exception as error:                               # the template is a program, with errors of its own
        return Check("chat", False, f"the target's chat template cannot be rendered ({type(error).__name__}: {error})")
    return Check("chat", True, f"the target has a chat template: Hello is {count} tokens")


def part_checks(target: Target, part: Spec, config: LoadConfig) -> list[Check]:
    """A drafter against the target: two vocabularies are compared, and a head is loaded, which every size of it has to fit."""
    from ..drafters import DRAFTERS
    from ..drafters.base import Site
    from ..drafters.vocabulary import Check, Words, compare
    from ..errors import VocabularyMismatch
    from ..models.load import builtin, load_target

    try:
        drafter: Any = DRAFTERS[part.name].from_spec(part.path, part.options, Site(target, "match", config))
    except VocabularyMismatch:
        if part.name not in ("model", "pard"):
            raise
        lm = load_target(part.path or builtin("draft" if part.name == "model" else part.name), config.of_draft())
        return compare(Words.of(target), Words.of(lm))
    if part.name in ("model", "pard"):
        return list(drafter.checks)
    weights, head = getattr(drafter, "weight_bytes", 0), getattr(drafter, "head", None)
    if not weights:
        return [Check("drafter", True, f"{part.name} has no weights and no vocabulary of its own")]
    ids = getattr(head, "ids", None)
    known = f"guesses {target.vocab_size if ids is None else len(ids)} of the target's {target.vocab_size} tokens"
    count = getattr(drafter, "parameters", None)             # a user's own class may call something else so
    parameters = f"{count / 1e6:.2f} M parameters, " if isinstance(count, int) else ""
    return [Check("drafter", True, f"{part.name} fits the target: {parameters}{size(weights)}; {known}")]


def _made_for(target: Target, part: Spec) -> list[Check]:
    """Whether it was this target that taught the drafter, where its folder tells."""
    from ..drafters.vocabulary import Check
    from ..train import card
    from ..train.place import identity

    made = card.read(part.path) if part.path else None
    if made is None:
        return []
    here = identity(target.facts.name)
    if made["target"].split()[-1] == here.split()[-1]:       # a folder may have moved; its hash is last
        return [Check("made for", True, "this target", fatal=False)]
    return [Check("made for", False, f"target {made['target']}, and this is {here}: its guesses will seldom stand", fatal=False)]


def report(document: dict[str, Any], target: Target, checks: list[Check], config: LoadConfig) -> list[str]:
    machine, versions = document["machine"], document["versions"]
    flags = ", ".join(f"{flag} {'yes' if present else 'no'}" for flag, present in machine["cpu_flags"].items())
    lines = [
        "machine",
        f"  {machine['system']}",
        f"  {machine['cpu']}, {machine['cores']} cores usable, threads {machine['threads']}, memory {size(machine['memory_bytes'] or 0)}",
        f"  CPU kernels for {machine['cpu_capability']}; {flags}",
        f"  GPU: {', '.join(machine['gpus']) or 'none that torch sees'}",
        "  " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "target",
        *(f"  {line}" for line in facts_lines(target.facts, config.cache_tokens)),
        f"  longest text: {target.context} tokens",
        f"checks (drafter {document['drafter']})",
        *(f"  {'ok   ' if c.ok else 'FAIL ' if c.fatal else 'note '} {c.name}: {c.detail}" for c in checks),
    ]
    failed = [c.name for c in checks if c.fatal and not c.ok]
    return [*lines, f"This pair cannot be used: {', '.join(failed)}." if failed else "Everything that must hold holds."]
