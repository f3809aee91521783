"""The command line: parse, run one command, turn every error into one line and an exit code.

    0 done · 1 failed · 2 wrong usage · 3 a threshold or parity check failed · 130 interrupted

Results go to standard output, progress and logs to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from . import __version__
from .commands.advise import advise
from .commands.audition import audition
from .commands.bench import bench
from .commands.chat import chat
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.export import export
from .commands.generate import generate
from .commands.profile import profile
from .commands.prove import prove
from .commands.serve import serve
from .commands.switch import switch
from .commands.train import extract, train
from .commands.view import view
from .errors import DraftproofError

COMMANDS = {"generate": generate, "chat": chat, "demo": demo, "doctor": doctor, "train": train, "extract": extract,
            "export": export, "serve": serve, "switch": switch, "view": view,
            "audition": audition, "advise": advise, "profile": profile, "bench": bench, "prove": prove}


@click.group(commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
def commands() -> None:
    """Makes language models generate faster by guessing ahead, and proves that not one token changed."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. With DRAFTPROOF_DEBUG set, an unforeseen error keeps its traceback."""
    # What the shell closed (`>&-`) is None to Python, and its number would be that of the next file opened.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is None:
        return _complain("standard output is closed, and results would be lost; expected a terminal, a file or a pipe", 1)
    if isinstance(sys.stdout, TextIOWrapper):           # as standard error has it: what another encoding lacks costs no result
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")      # other libraries' bars belong on a terminal too
    try:
        code = commands.main(arguments, prog_name="draftproof", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except DraftproofError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader left, as `head` does. Nothing may be written to that pipe again, not even by the exit of Python.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("DRAFTPROOF_DEBUG"):
            raise
        return _complain(f"unforeseen {type(error).__name__}: {error} (DRAFTPROOF_DEBUG=1 shows where)", 1)


def _complain(message: str, code: int) -> int:
    print("draftproof: " + " ".join(message.split()), file=sys.stderr)
    return code

