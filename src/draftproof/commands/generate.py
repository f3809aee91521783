"""draftproof generate: one prompt, its text as it arrives, a line about how it went."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..errors import Failure, OptionError, PromptError
from ..types import Sampling
from . import options as o
from .console import emit_json, load_lines, note, summary
from .view import Lines

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.port import Completion


@click.command(short_help="Generate text from a prompt.")
@click.argument("prompt", required=False, metavar="PROMPT|-")
@o.target_option
@o.speculation_options
@o.sampling_options
@o.setting(Sampling, "n", "--n", type=int, metavar="N", help="Samples; sample i has its own noise.")
@o.setting(Sampling, "logprobs", type=int, metavar="K", help="Log-probability of each token and of the K likeliest (in --json).")
@o.setting(Sampling, "prompt_logprobs", type=int, metavar="K", help="The same of the prompt's tokens (in --json).")
@o.setting(Sampling, "prediction", type=o.TextFile(), help="What the text will resemble, such as a file to be edited.")
@click.option("--prompt-ids", type=o.TokenIds(), help="Token ids instead of PROMPT.")
@o.load_options
@o.trace_options
@click.option("--show", is_flag=True, help="One line a round on standard error, as they run; the text follows.")
@click.option("--no-stream", is_flag=True, help="Write the text when it is complete.")
@o.json_option
def generate(prompt: str | None, target: str | None, prompt_ids: tuple[int, ...] | None, no_stream: bool, as_json: bool,
             show: bool, **given: Any) -> None:
    """Generate text from PROMPT; - reads standard input as it is, newlines included."""
    sampling, settings = o.sampling_of(given), o.settings_of(given)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            raise OptionError(f"--{name.replace('_', '-')} without --json: log-probabilities are part of the JSON document only")
    text = read_prompt(prompt, prompt_ids)
    o.check_prediction(sampling, settings.speculation.drafter)
    if show and not given.get("trace_file"):
        settings = replace(settings, engine=replace(settings.engine, trace="summary"))
    o.check_target(target)
    o.check_drafter(settings.speculation.drafter)
    o.check_guessing(settings, given)
    with o.open_engine(target, settings, given.get("trace_file")) as engine:
        for line in load_lines(engine, settings.load.cache_tokens):
            note(line)
        if show:
            engine.events(Lines(sys.stderr))
        streamed = not (no_stream or as_json or show or sampling.n > 1)
        done = run(engine, text, sampling, stream=streamed)
        failed = [c for c in done if c.error]
        if failed:
            raise Failure(f"sample {failed[0].sample} failed: {failed[0].error}")
        if as_json:
            emit_json(document(done))
        elif not streamed:
            print_samples(done)
        for completion in done:
            note(summary(completion, engine.target.facts))


def read_prompt(prompt: str | None, ids: tuple[int, ...] | None) -> str | list[int]:
    if (prompt is None) == (ids is None):
        raise PromptError("expected exactly one prompt: PROMPT, - for standard input, or --prompt-ids")
    if ids is not None:
        return list(ids)
    assert prompt is not None
    return o.check_prompt(o.decode_input(sys.stdin.buffer.read()) if prompt == "-" else prompt)


def run(engine: Engine, prompt: str | Sequence[int], sampling: Sampling, stream: bool) -> list[Completion]:
    """Step the engine until every sample is done, writing the text of one sample as it arrives."""
    handles = engine.submit(prompt, sampling)
    while not all(handle.done for handle in reversed(handles)):
        for event in engine.step():
            if stream and event.text:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if stream:
        sys.stdout.write("\n")
    return [handle.completion() for handle in handles]


def print_samples(done: Sequence[Completion]) -> None:
    for completion in done:
        if len(done) > 1:
            click.echo(f"--- sample {completion.sample}")
        click.echo(completion.text)


def document(done: Sequence[Completion]) -> dict[str, Any]:
    """`generate --json`. Several samples stand in "samples" too, and log-probabilities in "logprobs" and "prompt_logprobs", if they were
    asked for."""
    documents = [_sample(completion) for completion in done]
    return documents[0] if len(documents) == 1 else {**documents[0], "samples": documents}


def _sample(done: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": done.text, "token_ids": list(done.token_ids),
        "prompt_tokens": done.prompt_tokens, "completion_tokens": done.completion_tokens,
        "finish_reason": done.finish_reason, "seed": done.seed, "metrics": done.metrics, "speculation": done.speculation,
    }
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(done, name) is not None:
            record[name] = [{"token_id": t.token_id, "logprob": t.logprob,
                             "top": [{"token_id": a.token, "logprob": a.probability} for a in t.top]} for t in getattr(done, name)]
    return record
