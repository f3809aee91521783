"""draftproof doctor: what the machine is, what a load decided, and every check of a target/drafter pair."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..config import LoadConfig
from . import options as o
from .console import emit_json, facts_lines, note, size

if TYPE_CHECKING:
    from ..drafters.vocabulary import Check
    from ..models.target import Target


@click.command(short_help="Explain the machine and check a target/drafter pair.")
@o.target_option
@click.option("--drafter", metavar="SPEC", help="A drafter to check against the target.  [default: model, beside the built-in target]")
@o.load_options
@o.json_option
def doctor(target: str | None, drafter: str | None, as_json: bool, **given: Any) -> int:
    """Explain the machine, the load of a target, and every check of a pair. Exits with 1 if a check fails."""
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
    from ..drafters import build, parse_spec
    from ..drafters.translate import pair
    from ..drafters.vocabulary import Check, Words, compare
    from ..errors import VocabularyMismatch
    from ..models.load import builtin, load_target

    template = target.tokenizer is not None and target.tokenizer.has_chat_template
    text = target.tokenizer is not None
    checks = [Check("self-test", target.facts.invisible or not config.self_test, target.facts.invisible_reason, fatal=False),
              Check("tokenizer", text, "present" if text else "none; prompts must be token ids", fatal=False),
              Check("chat", template, f"the target has {'a' if template else 'no'} chat template", fatal=False)]
    parsed = parse_spec(spec)
    if parsed.name == "model":
        lm = load_target(parsed.path or builtin("draft"), config.of_draft())
        try:
            return checks + pair(target, lm).checks
        except VocabularyMismatch:
            return checks + compare(Words.of(target), Words.of(lm))
    build(spec, target, "match", config)
    return [*checks, Check("drafter", True, f"{spec} has no weights and no vocabulary of its own")]


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
