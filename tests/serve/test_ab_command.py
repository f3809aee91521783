"""The options of `draftproof serve` that compare, and a real server that was told to."""

from __future__ import annotations

import httpx2
import pytest
from click.testing import CliRunner
from serve.test_commands import BODY, started

from draftproof.cli import commands, run
from draftproof.commands.ab import ab_config
from draftproof.config import AbConfig


def parsed(*arguments: str) -> AbConfig | None:
    """What `serve` would be told, by its own options."""
    serve = commands.get_command(None, "serve")  # type: ignore[arg-type]
    assert serve is not None
    return ab_config(serve.make_context("serve", list(arguments)).params)


def test_what_the_options_mean() -> None:
    assert parsed() is None and parsed("--drafter", "ngram") is None
    assert parsed("--ab", "ngram vs off") == AbConfig("ngram vs off")
    assert parsed("--ab", "ngram vs off", "--ab-share", "25%") == AbConfig("ngram vs off", share=0.25)
    shadow = parsed("--ab", "ngram vs off", "--ab-share", "shadow", "--ab-replay", "0.5")
    assert shadow == AbConfig("ngram vs off", share="shadow", replay=0.5)
    assert parsed("--ab", "ngram vs off", "--ab-stages", "1%,10%,50%", "--ab-min", "30", "--ab-wait", "5", "--ab-ratio", "1.1",
                  "--ab-errors", "2%", "--ab-name", "october") == AbConfig(
        "ngram vs off", stages=(0.01, 0.1, 0.5), minimum=30, wait_s=5.0, ratio=1.1, errors=0.02, experiment="october")


@pytest.mark.parametrize(("arguments", "said"), [
    (("--ab-share", "0.5"), "--ab-share without --ab"), (("--ab-stages", "1%"), "--ab-stages without --ab"),
    (("--ab", "ngram"), "CANDIDATE vs CONTROL"), (("--ab", "ngram vs off", "--ab-share", "half"), "expected a share"),
    (("--ab", "ngram vs off", "--ab-stages", "50%,10%"), "rising shares"),
    (("--ab", "ngram vs off", "--ab-stages", "1%", "--ab-share", "0.5"), "leave one of them out"),
    (("--ab", "nonsense vs off"), "unknown drafter 'nonsense'"), (("--ab", "ngram depth=x vs off"), "expected auto or an integer"),
    (("--ab", "ngram vs model:./does-not-exist"), "no such folder"),
])
def test_wrong_usage_is_told(arguments: tuple[str, ...], said: str) -> None:
    from draftproof.errors import UsageError

    done = CliRunner().invoke(commands, ["serve", *arguments])
    assert isinstance(done.exception, UsageError | SystemExit) and done.exit_code and said in f"{done.output} {done.exception}"


def test_a_server_that_compares_the_built_in_drafter_with_none() -> None:
    assert run(["serve", "--ab", "nonsense vs off"]) == 2
    arms = ("--ab", "model depth=3 vs ngram", "--ab-share", "0.5", "--ab-replay", "1")
    with started(*arms) as (_, url), httpx2.Client(base_url=url) as client:
        texts = set()
        for user in ("ada", "grace", "edsger", "barbara"):
            reply = client.post("/v1/completions", json={**BODY, "max_tokens": 24, "temperature": 0, "user": user}, timeout=60)
            assert reply.status_code == 200, reply.text
            texts.add(reply.json()["choices"][0]["text"])
        report = client.get("/draftproof/ab.json").json()
    assert len(texts) == 1, "whoever guesses, the text is the target's"
    assert report["experiment"]["arms"] == {"candidate": "model depth=3", "control": "ngram"}
    assert sum(one["requests"] for one in report["cells"] if one["class"] == "all" and one["source"] == "served") == 4
    assert report["versions"]["target"].startswith("target (") and report["versions"]["drafter of control"] == "ngram"
