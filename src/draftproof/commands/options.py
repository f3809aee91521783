"""Options that the commands share, and how they become settings.

Defaults are read from the dataclasses, never repeated: an option that was not given is not passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from ..config import EngineConfig, LoadConfig, Settings, SpeculationConfig, TraceLevel
from ..errors import OptionError, PromptError
from ..types import RULES, Sampling
from .view_files import check_apart

if TYPE_CHECKING:
    from ..engine.engine import Engine

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
READ = "draftproof.read"        # of a command's context: the files that its options have read, by the options' names
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Depth(click.ParamType[int | None]):
    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "auto":
            return None
        if not re.fullmatch(r"\d+", str(value)):
            self.fail(f"{value!r}: expected auto or an integer ≥ 0", param, ctx)
        return int(value)


class Bias(click.ParamType[tuple[int, float]]):
    name = "ID=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token, sign, bias = str(value).partition("=")
        try:
            return int(token), float(bias if sign else "missing")
        except ValueError:
            self.fail(f"{value!r}: expected a token id and a number, as in 42=-1.5", param, ctx)


def _reads(file: str, param: click.Parameter | None, ctx: click.Context | None) -> None:
    """Notes a file that an option reads, so that nothing is written over it."""
    if ctx is not None and param is not None:
        ctx.meta.setdefault(READ, []).append((param.opts[0], Path(file)))


class Grammar(click.ParamType[dict[str, Any]]):
    """json · schema:FILE · regex:TEXT · lark:FILE, as `Sampling.grammar` has it."""

    name = "json|schema:FILE|regex:TEXT|lark:FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        kind, _, rest = str(value).partition(":")
        if value == "json":
            return {"json_object": True}
        if kind == "regex" and rest:
            return {"regex": rest}
        if kind not in ("schema", "lark") or not rest:
            self.fail(f"{value!r}: expected json, schema:FILE, regex:TEXT or lark:FILE", param, ctx)
        _reads(rest, param, ctx)
        try:
            text = Path(rest).read_text(encoding="utf-8")
            return {"lark": text} if kind == "lark" else {"json_schema": json.loads(text)}
        except (OSError, ValueError) as error:
            self.fail(f"{rest}: {error}; expected a file with a {'JSON schema' if kind == 'schema' else 'Lark grammar'}", param, ctx)


class TokenIds(click.ParamType[tuple[int, ...]]):
    name = '"1 2 3"'

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).replace(",", " ").split()
        if not words or not all(word.isdecimal() for word in words):
            self.fail(f"{value!r}: expected token ids ≥ 0, separated by spaces", param, ctx)
        return tuple(int(word) for word in words)


class TextFile(click.ParamType[str]):
    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        _reads(value, param, ctx)
        try:
            return Path(value).read_text(encoding="utf-8")
        except OSError as error:
            self.fail(f"{value}: {error.strerror}; expected a text file", param, ctx)
        except UnicodeDecodeError as error:
            self.fail(f"{value}: not valid UTF-8 at offset {error.start}; expected a text file", param, ctx)


def setting(home: type, name: str, *declarations: str, help: str, **attributes: Any) -> Decorator[Any]:
    """An option for the field `name` of the dataclass `home`. Left out, it stays None and the dataclass decides, unless the help names
    another default."""
    default = next(f.default for f in fields(home) if f.name == name)
    if default not in (None, MISSING, ()) and not isinstance(default, bool) and "[default:" not in help:
        help = f"{help}  [default: {default}]"
    return click.option(*(declarations or ("--" + name.replace("_", "-"),)), name, help=help, default=None, **attributes)


def stacked(*decorators: Decorator[Any]) -> Decorator[Any]:
    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def unlisted(*names: str) -> Decorator[Any]:
    """The options of these names, given below this line, stay out of the help: the command refuses them, and says why."""
    def apply(function: Any) -> Any:
        for option in function.__click_params__:
            option.hidden = option.hidden or option.name in names
        return function

    return apply


target_option = click.option("--target", metavar="PATH|ID", help="A model folder or a hub id.  [default: the built-in demo model]")

load_options = stacked(
    setting(LoadConfig, "dtype", type=str, metavar="NAME",
            help="bfloat16, float16 or float32.  [default: as saved, if the CPU is fast at it]"),
    setting(LoadConfig, "quantization", type=str, metavar="NAME", help="int8 or int4, on a GPU int4 or fp8: both models' rounded."),
    setting(LoadConfig, "device", type=str, metavar="NAME", help="cpu, cuda, cuda:1 …  [default: chosen, with the reason]"),
    setting(LoadConfig, "draft_device", type=str, metavar="NAME",
            help="Where drafters model and pard are loaded (not tested on a GPU); heads stay put.  [default: the target's device]"),
    setting(LoadConfig, "tensor_parallel", type=int, metavar="N",
            help="Divide the target's blocks among N processes, on GPUs (not tested) from --device on."),
    setting(LoadConfig, "graphs", "--graphs/--no-graphs",
            help="On CUDA, record passes of few rows and replay them, or run them one by one.  [default: graphs]"),
    setting(LoadConfig, "kernels", "--kernels/--no-kernels",
            help="On a GPU, our own kernels for the blocks of models that are known, or torch's.  [default: kernels]"),
    setting(LoadConfig, "compile", "--compile/--no-compile",
            help="On a GPU, join the operations between torch's products by torch.compile.  [default: no-compile]"),
    setting(LoadConfig, "threads", type=int, metavar="N", help="CPU threads.  [default: torch's choice: the cores, or OMP_NUM_THREADS]"),
    setting(LoadConfig, "cache_bits", type=int, metavar="16|8", help="8 halves what long texts take and read, on a CPU: keys are rounded."),
    setting(LoadConfig, "cache_tokens", type=int, metavar="N", help="Tokens, of all texts, whose keys are kept at a time, at most."),
    setting(LoadConfig, "prefill_chunk", type=int, metavar="N", help="Tokens of prompts that are read between two rounds, at most."),
    setting(LoadConfig, "reproducible", "--reproducible/--fast",
            help="Kernels whose rows do not depend on their neighbours, or the fastest.  [default: reproducible]"),
)

speculation_options = stacked(
    setting(SpeculationConfig, "drafter", type=str, metavar="SPEC", help="none · ngram · ngram:min=2,max=4 · suffix · model:PATH · A+B …"),
    setting(SpeculationConfig, "depth", type=Depth(), metavar="N|auto",
            help="How far to guess; a fixed depth is never lowered.  [default: auto]"),
    setting(SpeculationConfig, "tree", type=int, metavar="NODES", help="Guess a tree of at most so many tokens.  [default: chains]"),
    setting(SpeculationConfig, "rule", type=click.Choice(RULES),
            help="match keeps every token; ratio and block keep the distribution; lossy-typical keeps neither."),
)

sampling_options = stacked(
    setting(Sampling, "max_tokens", type=int, metavar="N", help="Stop after so many tokens."),
    setting(Sampling, "temperature", type=float, metavar="T", help="0 is greedy.  [default: the model's, else 1.0]"),
    setting(Sampling, "top_p", type=float, metavar="P", help="Keep the likeliest tokens of this mass.  [default: the model's, else 1.0]"),
    setting(Sampling, "top_k", type=int, metavar="K", help="Keep the K likeliest; 0 is off."),
    setting(Sampling, "min_p", type=float, metavar="P", help="Keep tokens at least so likely, relative to the likeliest."),
    setting(Sampling, "repetition_penalty", type=float, metavar="X", help="Over prompt and output."),
    setting(Sampling, "presence_penalty", type=float, metavar="X", help="Over the output."),
    setting(Sampling, "frequency_penalty", type=float, metavar="X", help="Over the output."),
    setting(Sampling, "logit_bias", type=Bias(), multiple=True, help="Add VALUE to a token's logit; repeatable."),
    setting(Sampling, "bad_words", "--bad-word", type=str, metavar="TEXT", multiple=True, help="Never write this; repeatable."),
    setting(Sampling, "min_tokens", type=int, metavar="N", help="No end of text before so many tokens."),
    setting(Sampling, "seed", type=int, metavar="S", help="The noise.  [default: drawn, and printed]"),
    setting(Sampling, "ignore_eos", "--ignore-eos", is_flag=True, flag_value=True, help="Go on after the model's end of text."),
    setting(Sampling, "stop", type=str, metavar="TEXT", multiple=True, help="Stop before this text; repeatable."),
    setting(Sampling, "grammar", type=Grammar(), metavar=Grammar.name, help="What the text must follow."),
    setting(Sampling, "stop_token_ids", "--stop-token-id", type=int, metavar="ID", multiple=True, help="Stop at this token; repeatable."),
)

trace_options = stacked(
    click.option("--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="Write the trace, one JSON object a line."),
    setting(EngineConfig, "trace", "--trace-level", type=click.Choice(get_args(TraceLevel)),
            help="How much of it. full has every id and probability: what train, audition and view need."),
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document as the last line of standard output.")


def pick(home: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that were given and belong to `home`."""
    names = {f.name for f in fields(home)}
    return {name: value for name, value in options.items() if name in names and value is not None and value != ()}


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    given = pick(Sampling, options)
    if "logit_bias" in given:
        named = [token for token, _ in given["logit_bias"]]
        twice = [token for token in named if named.count(token) > 1]
        if twice:
            raise OptionError(f"--logit-bias for token {twice[0]} twice: expected it once")
        given["logit_bias"] = dict(given["logit_bias"])
    return Sampling.of(**given)


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Settings from what was given; raises OptionError before anything is loaded."""
    trace, level = options.get("trace_file"), options.get("trace")
    if level is not None and trace is None:
        raise OptionError(f"--trace-level {level} without --trace: name the file to write")
    if trace is not None and level == "none":
        raise OptionError("--trace FILE with --trace-level none: choose summary or full, or leave --trace out")
    if trace is not None:
        check_trace(trace)
        context = click.get_current_context(silent=True)
        check_apart(context.meta.get(READ, ()) if context else (), [("--trace", trace)])
    engine = pick(EngineConfig, options) if trace is not None else {"trace": "none"}
    return Settings(LoadConfig.of(pick(LoadConfig, options)), SpeculationConfig.of(pick(SpeculationConfig, options)),
                    EngineConfig.of(engine))


def check_trace(file: Path) -> None:
    folder = file.absolute().parent
    if not folder.is_dir():
        raise OptionError(f"--trace {file}: {folder} {'is a file' if folder.exists() else 'does not exist'}; expected a folder: create it, "
                          "or name a file elsewhere")


def check_target(place: str | None) -> None:
    if place is not None:
        check_model(place, "--target")


def check_drafter(spec: str | None) -> None:
    """The model's path at the head of a drafter spec, if it has one: up to a plus that no folder's name has; the drafters read the rest."""
    name, _, path = (spec or "").partition(":")
    if name == "model" and path:
        ends = [*(plus.start() for plus in re.finditer(r"\+", path)), len(path)]
        end = next((end for end in reversed(ends) if Path(path[:end]).expanduser().is_dir()), ends[0])
        check_model(path[:end], "--drafter model:")


def check_guessing(settings: Settings, given: Mapping[str, Any]) -> None:
    """How to guess, where nothing guesses."""
    for name in ("tree", "rule"):
        if settings.speculation.drafter == "none" and given.get(name) is not None:
            raise OptionError(f"--{name} {given[name]} without a drafter: name one with --drafter, or leave it out")


def check_server(url: object, given: Mapping[str, Any]) -> None:
    """What only a server reads, where none is named."""
    if not url and (given["model"] or given["api_key_file"]):
        raise OptionError("--model or --api-key-file without --url: they are a server's; name it, or leave them out")


def check_prediction(sampling: Sampling, spec: str) -> None:
    if sampling.prediction and "prediction" not in [part.strip() for part in spec.split("+")]:
        raise OptionError(f"--prediction with --drafter {spec}, which does not read it: use --drafter prediction, or prediction+{spec}"
                          if spec != "none" else "--prediction without a drafter that reads it: add --drafter prediction")


def check_model(place: str, option: str) -> None:
    """Refuse, before torch is loaded, a path that cannot be a model: nothing there, no weights, or weights only as pickle."""
    folder = Path(place).expanduser()
    if not folder.exists():
        if not HUB_ID.fullmatch(place):
            raise OptionError(f"{option} {place}: no such folder; expected a model folder (config.json and safetensors) or a hub id")
        return
    if not folder.is_dir():
        raise OptionError(f"{option} {place}: found a file, expected a model folder with config.json and safetensors")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        found = f"{pickles[0]}, which is pickle and may run code" if pickles else "no weights"
        raise OptionError(f"{option} {place}: found {found}, expected *.safetensors; convert the weights with save_pretrained")


def check_prompt(text: str) -> str:
    """A prompt that is text: not empty, and valid Unicode (a stray byte of the command line arrives as a lone surrogate)."""
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid UTF-8 at character {error.start}; give UTF-8 text") from None
    return text


def decode_input(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
                          "give UTF-8 text") from None


@contextmanager
def open_engine(target: str | None, settings: Settings, trace_file: Path | None) -> Iterator[Engine]:
    """The engine that the options describe, its events going to the trace file if there is one. Loads torch."""
    from ..drafters import parse_spec
    from ..engine.engine import Engine
    from ..trace.sinks import Jsonl

    wanted = settings.speculation
    parse_spec(wanted.drafter)                      # a wrong spec is told before a model is loaded
    with ExitStack() as stack:
        sinks = []
        if trace_file is not None:
            sinks.append(Jsonl(trace_file))
            stack.callback(sinks[0].close)
        yield stack.enter_context(Engine(target, wanted.drafter, "auto" if wanted.depth is None else wanted.depth, tree=wanted.tree,
                                         rule=wanted.rule, load=settings.load, config=settings.engine, sinks=sinks))
