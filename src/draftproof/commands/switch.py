"""draftproof switch: turn a running server's speculation on or off, from the next round on."""

from __future__ import annotations

import json
import os
import re
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import click

from ..errors import Failure, OptionError
from ..serve.keys import checked, lines_of, words_of
from .console import emit_json, note
from .options import json_option

KEY = "DRAFTPROOF_API_KEY"
STATE = ("state", "drafter", "depth", "reason")     # what a server tells of its speculation, at least
MOST_CAP = 1024                                     # that a server takes


class Cap(click.ParamType["int | Literal['none']"]):
    name = "N|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["none"]:
        if value == "none":
            return "none"
        if not re.fullmatch(r"\d{1,4}", str(value), re.ASCII) or int(value) > MOST_CAP:
            self.fail(f"{value!r}: expected none or an integer from 0 to {MOST_CAP}", param, ctx)
        return int(value)


@click.command(short_help="Turn a running server's speculation on or off.")
@click.argument("state", type=click.Choice(["on", "off", "status"]))
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, metavar="URL", help="Where the server listens.")
@click.option("--depth-cap", type=Cap(), metavar="N|none", help="No draft deeper than this; none takes the cap away.")
@click.option("--drafter", metavar="SPEC", help="Another drafter: none, the server's own, or one that needs no files.")
@click.option("--api-key-file", "key_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help=f"A file whose first line is the key.  [default: the variable {KEY}]")
@json_option
def switch(state: str, url: str, depth_cap: int | Literal["none"] | None, drafter: str | None, key_file: Path | None,
           as_json: bool) -> None:
    """Turn a running server's speculation on or off. Texts that are being written go on, and do not change."""
    wanted = {"enabled": state == "on", "depth_cap": depth_cap, "drafter": drafter}
    said = {name: value for name, value in wanted.items() if value is not None}
    body = None if state == "status" else {**said, "depth_cap": None} if depth_cap == "none" else said
    if body is None and (depth_cap is not None or drafter is not None):
        raise OptionError("switch status changes nothing: leave --depth-cap and --drafter out, or say on or off")
    found = ask(url, body, key_of(key_file))
    if as_json:
        emit_json(found)
    else:
        cap = "" if found.get("depth_cap") is None else f", at most {found['depth_cap']}"
        click.echo(f"speculation {found['state']}: drafter {found['drafter']}, depth {found['depth']}{cap} ({found['reason']})")


def key_of(file: Path | None) -> str | None:
    """The key to send: the first in the file, its name and mark left out."""
    if file is None:
        key = os.environ.get(KEY)
        return None if key is None else checked(key, KEY)
    try:
        lines = lines_of(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {file}: {error}; expected a text file with a key") from None
    if not lines:
        raise OptionError(f"--api-key-file {file}: found no key; expected one a line")
    if len(lines[0].split()) == 1:              # perhaps another engine's, whose length is not ours to judge
        return checked(lines[0], f"--api-key-file {file}")
    return words_of(lines[0], f"--api-key-file {file}").key


def ask(url: str, body: dict[str, Any] | None, key: str | None) -> dict[str, Any]:
    """GET the state, or PUT a change. Raises Failure with the server's own words, OptionError for what is no address."""
    check_url(url)
    request = Request(url.rstrip("/") + "/draftproof/speculation", method="GET" if body is None else "PUT",
                      data=None if body is None else json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urlopen(request, timeout=30) as reply:
            answer = reply.read()
    except HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")
        try:
            said = json.loads(said)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            note(said[:300])
        raise Failure(f"{url} answered {error.code}: {said[:300]}") from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise Failure(f"{url}: {getattr(error, 'reason', error)}; is the server running there?") from None
    return state_of(url, answer)


def check_url(url: str, option: str = "--url") -> None:
    """Raises OptionError, naming the option that it was given to."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:                      # a port that is no number, brackets that do not match
        good = False
    if not good or not url.isprintable() or " " in url:
        raise OptionError(f"{option} {url}: expected http://HOST:PORT")


def state_of(url: str, answer: bytes) -> dict[str, Any]:
    """The state of speculation in an answer. Raises Failure if it has none."""
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(name in found for name in STATE):
        raise Failure(f"{url} answered {answer[:80].decode(errors='replace')!r}; expected the state of speculation ({', '.join(STATE)}): "
                      "name the address of a draftproof server with --url")
    return found
