"""draftproof serve: a server with the OpenAI API. Prints one line with the address when it is ready."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig, ServeConfig
from ..errors import OptionError
from . import options as o
from .ab import ab_config, ab_options, others_of, with_drafter
from .console import load_lines, log_lines, note
from .remote import check_local, remote_options, serve_vllm
from .view_files import check_apart

DEMO = "draftproof-demo"


@click.command(short_help="Serve a model through the OpenAI API.")
@o.target_option
@o.speculation_options
@o.setting(ServeConfig, "host", metavar="NAME", help="Where to listen. Beyond the loopback an API key is needed.")
@o.setting(ServeConfig, "port", type=int, metavar="N", help="0 takes one that is free.")
@click.option("--api-key-file", "key_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="One key a line, [NAME] KEY [admin] [trace]; DRAFTPROOF_API_KEYS may hold some, too.")
@o.setting(ServeConfig, "hosts", "--allow-host", multiple=True, metavar="NAME", help="A name that a Host header may have; repeatable.")
@o.setting(ServeConfig, "origins", "--allow-origin", multiple=True, metavar="URL", help="A web page that may call; repeatable.")
@click.option("--served-model-name", "name", metavar="NAME", help="What clients call the model.  [default: as --target]")
@o.setting(EngineConfig, "max_batch", type=int, metavar="N", help="Texts written at a time.  [default: 16; 256 with --engine vllm]")
@o.setting(ServeConfig, "max_queue", type=int, metavar="N", help="Requests that may wait behind them.")
@o.setting(ServeConfig, "max_per_tenant", type=int, metavar="N", help="Open requests of one key.")
@o.setting(ServeConfig, "deadline_s", "--deadline", type=float, metavar="S", help="Seconds for a whole request.")
@o.setting(ServeConfig, "drain_s", "--drain", type=float, metavar="S", help="Seconds to finish what runs when told to stop.")
@o.setting(ServeConfig, "chunks", metavar="round|tokens:N|ms:T", help="What a piece of a stream holds; fixed sizes hide acceptance.")
@o.setting(ServeConfig, "access_log", is_flag=True, help="Log a line for every answer.")
@o.setting(ServeConfig, "otel", is_flag=True, help="Send OpenTelemetry spans; OTEL_* variables say where.")
@ab_options
@o.load_options
@o.trace_options
@remote_options
def serve(target: str | None, key_file: Path | None, name: str | None, engine: str, **given: Any) -> None:
    """Serve a model through the OpenAI API, with speculation under control per request.

    Two signals to know: one SIGTERM (or Ctrl-C) finishes what runs, a second one stops at once.
    """
    ab = ab_config(given)
    given = with_drafter(given, ab)
    settings = o.settings_of(given)
    level = settings.engine.trace if given.get("trace_file") is not None else "summary"     # the server's numbers are read from it
    engine_config = replace(settings.engine, trace=level, **o.pick(EngineConfig, {"max_batch": given["max_batch"]}))
    config = ServeConfig.of({**o.pick(ServeConfig, given), "ab": ab})
    o.check_target(target)
    o.check_drafter(settings.speculation.drafter)
    check_apart([("--api-key-file", key_file)], [("--trace", given.get("trace_file"))])
    try:
        from ..serve.gate import check_address, check_free, read_keys

        keys = read_keys(key_file)
        check_address(config, keys)
        check_free(config)
        from ..serve.run import Listener, serve_engine

        if config.otel:
            from ..serve.otel import check

            check()                                 # a wrong name or number is told before a model is loaded
    except ImportError as error:
        extra = "otel" if str(error.name).startswith("opentelemetry") else "serve"
        raise OptionError(f"serve needs {error.name}: pip install 'draftproof[{extra}]'") from None
    log_lines()
    if engine == "vllm":
        return serve_vllm(target, settings, config, name or target or DEMO, given, lambda server: Listener(
            server, keys, lambda address: click.echo(f"draftproof serves {server.served.name} on {address}")).run())
    check_local(given)
    from ..drafters import parse_spec
    from ..engine.engine import Engine
    from ..engine.setup import open_target
    from ..trace.sinks import Jsonl, Sink

    wanted = settings.speculation
    parse_spec(wanted.drafter)                      # a wrong spec is told before a model is loaded
    others = others_of(ab, wanted.drafter)
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if given.get("trace_file") is not None:
            sinks.append(Jsonl(given["trace_file"]))
            stack.callback(sinks[0].close)
        loaded = open_target(target, settings.load)

        def open_engine() -> Engine:
            return Engine(loaded, wanted.drafter, "auto" if wanted.depth is None else wanted.depth, tree=wanted.tree, rule=wanted.rule,
                          load=settings.load, config=engine_config, sinks=sinks, others=others)

        first = open_engine()
        for line in load_lines(first, settings.load.cache_tokens):
            note(line)
        engines = iter([first])
        server = serve_engine(lambda: next(engines, None) or open_engine(), name or target or DEMO, loaded, wanted.drafter, config,
                              engine_config.max_batch)
        Listener(server, keys, lambda address: click.echo(f"draftproof serves {server.served.name} on {address}")).run()
