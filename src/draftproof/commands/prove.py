"""draftproof prove: is the text the target's own? The rule by enumeration, the run token by token, the task by its scores.

Ends with 3 if a level fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import LoadConfig, ProveConfig, SpeculationConfig
from ..errors import OptionError, ParityError
from ..types import Rule
from . import options as o
from .console import emit_json, facts_lines, note
from .switch import key_of
from .view_files import check_apart

if TYPE_CHECKING:
    from ..bench.prove_rule import Check
    from ..bench.workload import Item
    from ..models.tokenizer import Tokenizer

LEVELS = ("rule", "run", "task")
PEERS = ("transformers",)
WORDS = {"rule": "the rule, on this installation", "run": "the run: this target, this drafter, these options", "task": "the task"}
Level = dict[str, Any]


@click.command(short_help="Prove that speculation changes nothing; a report, and exit code 3 if it does.")
@o.target_option
@o.setting(SpeculationConfig, "drafter", type=str, metavar="SPEC",
           help="What guesses.  [default: model for the built-in target, else ngram]")
@o.setting(SpeculationConfig, "depth", type=o.Depth(), metavar="N|auto", help="How far.  [default: auto]")
@o.setting(SpeculationConfig, "tree", type=int, metavar="NODES", help="Guess trees of at most so many tokens.")
@o.setting(SpeculationConfig, "rule", type=click.Choice(("match", "ratio", "block")), help="How drafts are judged.")
@click.option("--peer", type=click.Choice(PEERS),
              help="Put another engine's own guessing to the proof: transformers' generate, assisted against plain, greedy.")
@click.option("--url", metavar="URL", help="A server that guesses, instead of an engine here.")
@click.option("--baseline-url", metavar="URL",
              help="The same model without guessing.  [default: --url, asked not to guess, as our server can]")
@click.option("--model", metavar="NAME", help="The server's model.  [default: its first]")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Its first line has the key, as `switch` reads it.")
@click.option("--level", "levels", type=click.Choice(LEVELS), multiple=True, help="Only this level; repeatable.  [default: all]")
@click.option("--workload", type=Path, metavar="FILE", help="Prompts of the run, JSON lines.  [default: the built-in prompts]")
@click.option("--tasks", type=Path, metavar="FILE", help='Scored prompts, JSON lines with "expect" or "answer".')
@o.setting(ProveConfig, "prompts", type=int, metavar="N", help="Texts per temperature.")
@o.setting(ProveConfig, "tokens", type=int, metavar="N", help="Of each text.")
@o.setting(ProveConfig, "batch", type=int, metavar="N", help="Texts side by side in the control.")
@click.option("--temperature", "temperature", type=float, multiple=True, metavar="T", help="Repeatable.  [default: 0 and 0.8]")
@o.setting(ProveConfig, "seed", type=int, metavar="S", help="The noise.")
@o.setting(ProveConfig, "margin", type=float, metavar="SHARE", help="Largest difference of task scores that counts as none.")
@o.setting(ProveConfig, "draws", type=int, metavar="N", help="Texts per χ² test.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The report as a page.")
@o.load_options
@o.json_option
def prove(levels: tuple[str, ...], temperature: tuple[float, ...], html_file: Path | None, as_json: bool, **given: Any) -> int:
    """Prove parity on three levels, and say in words what was shown and what was not."""
    config = ProveConfig.of({**o.pick(ProveConfig, given), **({"temperatures": temperature} if temperature else {})})
    wanted = levels or LEVELS
    check(wanted, {**given, "temperature": temperature}, html_file)
    found: dict[str, Level] = {}
    if given["peer"]:
        with_peer(found, wanted, given, config)
    elif "rule" in wanted and not given["url"]:
        from ..bench.prove_rule import prove_rule

        found["rule"] = level_of(prove_rule(config.draws, note))
    elif "rule" in wanted:
        found["rule"] = skipped("a server's code cannot be enumerated from outside; run prove where it is installed")
    if {"run", "task"} & set(wanted) and not given["peer"]:
        with ExitStack() as stack:
            found |= (server if given["url"] else here)(stack, wanted, given, config)
    document = document_of({name: found[name] for name in LEVELS if name in found})
    if as_json:
        emit_json(document)
    else:
        click.echo(in_words(document))
    if html_file is not None:
        from ..bench.report import write_files

        write_files({html_file: partial(write_html, document)})
    if not document["passed"]:
        raise ParityError(f"not proved: {'; '.join(document['reasons'])}")
    return 0


def check(wanted: Sequence[str], given: Mapping[str, Any], html_file: Path | None) -> None:
    """What can be refused before anything is loaded."""
    if given["url"] and (given["target"] or given["tree"] or given["rule"]):
        raise OptionError("--url with --target, --tree or --rule: a server has its own; leave them out, or leave --url out")
    if given["peer"]:
        check_peer(wanted, given)
    o.check_server(given["url"], given)
    for name, level in (("workload", "run"), ("tasks", "task")):
        if given[name] and level not in wanted:
            raise OptionError(f"--{name} with --level {' and '.join(wanted)}: only level {level} reads it; "
                              f"add --level {level}, or leave it out")
    if given["baseline_url"] and not given["url"]:
        raise OptionError("--baseline-url without --url: name the server that guesses too")
    if given["url"] and not (given["workload"] or wanted == ("task",)):
        raise OptionError("--url without prompts: add --workload FILE")
    if wanted == ("task",) and not given["tasks"]:
        raise OptionError("--level task without --tasks: name the file with scored prompts")
    check_apart([("--workload", given["workload"]), ("--tasks", given["tasks"]), ("--api-key-file", given["api_key_file"])],
                [("--html", html_file)])
    if html_file is not None and not html_file.absolute().parent.is_dir():
        raise OptionError(f"--html {html_file}: the folder does not exist; create it, or name a file elsewhere")
    if not given["url"]:
        drafter = given["drafter"] or drafter_for(given["target"])
        SpeculationConfig.of({**o.pick(SpeculationConfig, given), "drafter": drafter})
        if drafter == "none":
            raise OptionError("--drafter none: there is nothing to prove; name a drafter")
    o.check_target(given["target"])
    o.check_drafter(given["drafter"])


def check_peer(wanted: Sequence[str], given: Mapping[str, Any]) -> None:
    """What makes no sense of another engine."""
    for name in ("url", "baseline_url", "tree", "rule", "tasks"):
        if given[name]:
            raise OptionError(f"--{name.replace('_', '-')} with --peer {given['peer']}: it has its own engine, and drafts chains greedily; "
                              "leave it out")
    if any(given["temperature"]):
        raise OptionError(f"--temperature {max(given['temperature']):g} with --peer {given['peer']}: sampled texts of an engine that "
                          "does not share its noise cannot be compared; leave it out, or give 0")
    if "run" not in wanted:
        raise OptionError(f"--level {wanted[0]} with --peer {given['peer']}: only its runs can be looked at; use --level run")
    name = (given["drafter"] or drafter_for(given["target"])).partition(":")[0]
    if name not in ("model", "ngram"):
        raise OptionError(f"--drafter {given['drafter']} with --peer {given['peer']}: expected model:PATH (assisted generation) or ngram "
                          "(prompt lookup)")
    if given["depth"] == 0:
        raise OptionError("--depth 0: there is nothing to prove; expected an integer ≥ 1, or auto")


def drafter_for(target: str | None) -> str:
    return "ngram" if target else "model"


def here(stack: ExitStack, wanted: Sequence[str], given: Mapping[str, Any], config: ProveConfig) -> dict[str, Level]:
    """Levels run and task on an engine of ours."""
    from ..bench.arms import local_arms
    from ..bench.prove_run import Subject, prove_run
    from ..bench.prove_task import prove_task, read_tasks
    from ..drafters import parse_spec
    from ..models.load import builtin, load_target

    drafter = given["drafter"] or drafter_for(given["target"])
    parse_spec(drafter)
    tasks = read_tasks(given["tasks"]) if given["tasks"] else []
    load = LoadConfig.of(o.pick(LoadConfig, given))
    note("loading the target …")
    target = load_target(given["target"] or builtin("target"), load)
    for line in facts_lines(target.facts, load.cache_tokens):
        note(line)
    rule: Rule = given["rule"] or "match"
    found: dict[str, Level] = {}
    arms = local_arms(stack, target, [drafter], [given["depth"]], load, tree=given["tree"], rule=rule)
    if "run" in wanted:
        items, client = prompts(given, config, target.tokenizer), arms[0].client
        ids = [client.prompt(job_of(item, config)) for item in items]            # type: ignore[attr-defined]
        subject = Subject(target, drafter, given["depth"], given["tree"], rule, load)
        found["run"] = prove_run(subject, ids, config, note).as_json() | {
            "engine": "draftproof", "target": target.facts.name, "drafter": drafter, "depth": given["depth"] or "auto", "rule": rule,
            "dtype": target.facts.dtype, "invisible": target.facts.invisible_reason}
    if "task" in wanted:
        found["task"] = skipped("no scored prompts were given (--tasks FILE)")
        if tasks:
            note(f"task: {len(tasks)} scored prompts, with guessing and without …")
            note_unsent([task.item for task in tasks], given, target.tokenizer)
            found["task"] = prove_task(arms[0].client, arms[1].client, tasks, config.tokens, config.temperatures[0], config.seed,
                                       config.margin).as_json()
    return found


def with_peer(found: dict[str, Level], wanted: Sequence[str], given: Mapping[str, Any], config: ProveConfig) -> None:
    """Level run on transformers' own generation; the others are told why they were not looked at."""
    from ..bench.load import prompt_ids
    from ..bench.machine import versions
    from ..bench.prove_peer import prove_peer
    from ..models.load import builtin
    from ..models.peer import TransformersPeer, assistant_place

    for name in LEVELS:
        if name in wanted and name != "run":
            found[name] = skipped(f"of {given['peer']} only the run can be looked at")
    drafter = given["drafter"] or drafter_for(given["target"])
    load = LoadConfig.of(o.pick(LoadConfig, given))
    note("loading the models …")
    peer = TransformersPeer(given["target"] or builtin("target"), assistant_place(drafter), given["depth"], load)
    room = max(1, peer.context - config.tokens - 1)
    ids = [prompt_ids(job_of(item, config), peer.tokenizer)[-room:] for item in prompts(given, config, peer.tokenizer)]
    found["run"] = prove_peer(peer, ids, config, note).as_json() | {
        "engine": f"transformers {versions()['transformers']}", "target": peer.name, "drafter": drafter, "depth": given["depth"] or "auto",
        "rule": "greedy", "dtype": str(peer.dtype).removeprefix("torch.")}


def server(stack: ExitStack, wanted: Sequence[str], given: Mapping[str, Any], config: ProveConfig) -> dict[str, Level]:
    """Levels run and task on servers."""
    from ..bench.endpoint import Endpoint
    from ..bench.prove_task import prove_task, read_tasks
    from ..bench.prove_url import prove_url, telling

    key = key_of(given["api_key_file"]) if given["api_key_file"] else None       # the variable's is for our own servers alone
    ours = given["baseline_url"] is None
    drafter = {} if given["drafter"] is None else {"speculation": {"drafter": given["drafter"]}}
    arms = []
    for url, speculation in ((given["baseline_url"] or given["url"], {"speculation": {"drafter": "none"}} if ours else {}),
                             (given["url"], drafter)):
        for more in ({"top_logprobs": 5}, {}):
            client = Endpoint(url, given["model"], key, {**speculation, **more})
            stack.callback(client.close)
            arms.append(client)
    off_logprobs, off, on_logprobs, on = arms
    found: dict[str, Level] = {}
    if "run" in wanted:
        items = prompts(given, config)
        report = prove_url(telling(off_logprobs, off, items[0], config, note), telling(on_logprobs, on, items[0], config, note),
                           items, config, note, sampled=ours)
        found["run"] = report.as_json() | {"target": off.models[0], "drafter": given["drafter"] or "the server's own"}
    if "task" in wanted:
        found["task"] = skipped("no scored prompts were given (--tasks FILE)")
        if given["tasks"]:
            tasks = read_tasks(given["tasks"])
            note_unsent([task.item for task in tasks], given, None)
            found["task"] = prove_task(off, on, tasks, config.tokens, config.temperatures[0], config.seed,
                                       config.margin).as_json()
    return found


def prompts(given: Mapping[str, Any], config: ProveConfig, tokenizer: Tokenizer | None = None) -> list[Item]:
    """As many as asked for, the classes in turn. tokenizer: of an engine here."""
    from ..bench.workload import Item, read_items
    from .demo import packaged_prompts

    items = (read_items(given["workload"]) if given["workload"] else
             [Item(str(i), record["class"], (record["prompt"],)) for i, record in enumerate(packaged_prompts(), 1)])
    place: dict[str, int] = {}
    order = []
    for item in items:
        place[item.prompt_class] = place.get(item.prompt_class, 0) + 1
        order.append((place[item.prompt_class], item))
    chosen = [item for _, item in sorted(order, key=lambda pair: pair[0])][:config.prompts]
    note_unsent(chosen, given, tokenizer)
    return chosen


def note_unsent(items: Sequence[Item], given: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
    """tokenizer: of an engine here, None of a server."""
    from ..bench.workload import unsent

    here = not given["url"]
    for line in unsent(items, here, not here or tokenizer is not None and tokenizer.takes_tools):
        note(line)


def job_of(item: Item, config: ProveConfig) -> Any:
    from ..bench.load import Job, Load

    return Job("proof", Load(1), 0, 0, item, config.seed, config.tokens, 0.0)


def level_of(checks: Sequence[Check]) -> Level:
    return {"passed": all(c.passed for c in checks), "checks": [c.as_json() for c in checks]}


def skipped(why: str) -> Level:
    """A level that was not looked at: neither passed nor failed."""
    return {"passed": None, "checks": [], "skipped": why}


def document_of(levels: Mapping[str, Level]) -> dict[str, Any]:
    from ..bench.machine import machine, versions

    reasons = [f"{check['name']}: {check['detail']}" for level in levels.values() for check in level["checks"] if not check["passed"]]
    looked = [level["passed"] for level in levels.values() if level["passed"] is not None]
    if not looked:
        reasons.append("no level was looked at")
    return {"passed": bool(looked) and all(looked), "reasons": reasons, "failures": failures(levels),
            "levels": {name: levels.get(name, skipped("not asked for")) for name in LEVELS},
            "machine": machine(), "versions": versions(), "command": " ".join(["draftproof", *sys.argv[1:]])}


def verdict(level: Level) -> str:
    return {True: "passed", False: "FAILED", None: f"not looked at: {level.get('skipped', '')}"}[level["passed"]]


def in_words(document: Mapping[str, Any]) -> str:
    lines = []
    for name, level in document["levels"].items():
        lines.append(f"{WORDS[name]}: {verdict(level)}")
        lines += [f"  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in level["checks"]]
        lines += [f"        {c['identical']} of {c['texts']} texts identical, temperature {c['temperature']:g}: {c['name']}"
                  for c in level.get("comparisons", ())]
    rows = failure_rows(document)
    lines += [f"first divergences ({' · '.join(HEAD)}):", *("  " + " · ".join(row) for row in rows)] if rows else []
    lines.append("Verdict: proved, as far as the levels above looked." if document["passed"] else "Verdict: NOT proved.")
    return "\n".join(lines)


def failures(levels: Mapping[str, Level]) -> list[dict[str, Any]]:
    """The table of failure cases: every first divergence, with the model, the sampling configuration and the margin."""
    run = levels.get("run", {})
    setting = {"model": run.get("target", ""), **{name: run.get(name) for name in ("engine", "dtype", "drafter", "depth", "rule")}}
    return [setting | divergence for comparison in run.get("comparisons", ()) for divergence in comparison["divergences"]]


HEAD = ("model", "configuration", "comparison", "prompt", "token", "wrote", "margin", "verdict")


def failure_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The same for people, in the columns of HEAD."""
    rows: list[tuple[str, ...]] = []
    for case in document["failures"]:
        words = (case["dtype"], f"{case['drafter']} at depth {case['depth']}" if case["depth"] else case["drafter"],
                 case["rule"] and f"rule {case['rule']}", f"temperature {case['temperature']:g}")
        margin = "unknown" if case["margin"] is None else f"{case['margin']:.3g}"
        margin += "" if case["ulps"] is None else f" = {case['ulps']:.3g} ulp"
        margin += "" if case["gap"] is None else f", gap {case['gap']:.3g} ulp"
        rows.append((Path(case["model"]).name, ", ".join(filter(None, words)), case["comparison"], str(case["prompt"] + 1),
                     str(case["at"] + 1), f"{case['token']!r}, not {case['expected']!r}", margin,
                     "near tie" if case["near_tie"] else "ERROR"))
    return rows


def write_html(document: Mapping[str, Any], file: Path) -> None:
    from ..bench.report import html_table, page

    word = "proved" if document["passed"] else "NOT proved"
    body = f'<p class="{"good" if document["passed"] else "bad"}">{word}</p>'
    body += "".join(f'<p class="bad">{escape(reason)}</p>' for reason in document["reasons"])
    for name, level in document["levels"].items():
        body += f"<h2>{escape(WORDS[name])}: {escape(verdict(level))}</h2>"
        if level["checks"]:
            body += html_table(("check", "outcome", "what was found"),
                               [(c["name"], "ok" if c["passed"] else "FAIL", c["detail"]) for c in level["checks"]])
    rows = failure_rows(document)
    if rows:
        body += "<h2>First divergences, by model and sampling configuration</h2>" + html_table(HEAD, rows)
    facts = json.dumps({name: document[name] for name in ("machine", "versions", "command")}, indent=1)
    file.write_text(page("draftproof prove", f"{body}<h2>Where this was proved</h2><pre>{escape(facts)}</pre>"), encoding="utf-8")
