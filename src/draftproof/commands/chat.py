"""draftproof chat: a conversation through the model's own chat template. The engine finds the earlier turns in its prefix cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..errors import Failure, LoadError, PromptError
from . import options as o
from .console import load_lines, note, summary

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.port import Completion
    from ..types import Sampling

HELP = "/reset forgets the conversation, /exit leaves"


@click.command(short_help="Talk with a model.")
@o.target_option
@o.speculation_options
@o.sampling_options
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@o.load_options
@o.trace_options
def chat(target: str | None, system: str | None, **given: Any) -> None:
    """Talk with a model, line by line; standard input may be a pipe. Answers go to standard output."""
    sampling, settings = o.sampling_of(given), o.settings_of(given)
    o.check_target(target)
    o.check_drafter(settings.speculation.drafter)
    o.check_guessing(settings, given)
    with o.open_engine(target, settings, given.get("trace_file")) as engine:
        for line in load_lines(engine, settings.load.cache_tokens):
            note(line)
        if engine.target.tokenizer is None or not engine.target.tokenizer.has_chat_template:
            raise LoadError(f"{engine.target.facts.name} has no chat template; use generate, or a model with one")
        note(HELP)
        talk(engine, sampling, [{"role": "system", "content": o.check_prompt(system)}] if system is not None else [])


def talk(engine: Engine, sampling: Sampling, opening: list[dict[str, str]]) -> None:
    """Read lines until /exit or the end of input; each is a turn of the user, answered from the whole conversation."""
    history = list(opening)
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    while (line := read_line()) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            history = list(opening)
            note("the conversation is forgotten")
        elif line.strip().startswith("/"):
            note(f"unknown command {line.split()[0]}; {HELP}")
        elif line.strip():
            turn = {"role": "user", "content": line}
            try:
                done = answer(engine, tokenizer.chat([*history, turn]), sampling)
            except PromptError as error:
                note(f"{error}; /reset begins again")
                continue
            history += [turn, {"role": "assistant", "content": done.text}]
            note(summary(done, engine.target.facts))


def answer(engine: Engine, prompt: list[int], sampling: Sampling) -> Completion:
    """Write one answer as it arrives. Ctrl-C ends the answer, not the conversation."""
    handle = engine.submit(prompt, sampling)[0]
    try:
        while not handle.done:
            for event in engine.step():
                click.echo(event.text, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        engine.cancel(handle.id)
        note(" (interrupted)")
    click.echo()
    done = handle.completion()
    if done.error:
        raise Failure(f"the answer failed: {done.error}")
    return done


def read_line() -> str | None:
    """The next line, or None at the end. A terminal gets a prompt and line editing; a pipe is read as bytes and must be UTF-8."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (importing it gives input() its editing keys)

        try:
            if not sys.stdout.isatty():                         # answers go to a file: the prompt is none
                click.echo("> ", nl=False, err=True)
            return o.check_prompt(input("> " if sys.stdout.isatty() else "") or " ")
        except EOFError:
            note("")
            return None
    data = sys.stdin.buffer.readline()
    return o.decode_input(data).rstrip("\r\n") if data else None
