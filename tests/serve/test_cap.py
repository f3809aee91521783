"""The operator's cap from the command line: set, told by everything that tells the state, and taken away."""

from __future__ import annotations

import logging

import pytest
from serve.serving import letters, serving

from draftproof.cli import run


def test_a_cap_is_set_told_and_taken_away(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with serving(letters(), "ngram:min=1,max=2", depth=4) as running, running.client() as client:

        def switch(*arguments: str) -> str:
            assert run(["switch", *arguments, "--url", running.url]) == 0
            return capsys.readouterr().out

        with caplog.at_level(logging.WARNING, "draftproof.serve"):
            assert switch("on", "--depth-cap", "2") == "speculation on: drafter ngram, depth 4, at most 2 (no round yet)\n"
        assert "'depth_cap': 2" in caplog.text.partition("→")[2]
        assert ", at most 2 (" in switch("on") and ", at most 2 (" in switch("status"), "what is left out stays as it is"
        assert 'draftproof:spec_decode_depth_cap{model_name="letters"} 2.0' in client.get("/metrics").text
        assert switch("on", "--depth-cap", "none") == "speculation on: drafter ngram, depth 4 (no round yet)\n"
        assert "spec_decode_depth_cap" not in client.get("/metrics").text
        out = running.complete(prompt="abababab", seed=1, max_tokens=30)
        assert out["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4
        assert "depth_cap" not in out["speculation"], "of one text: its reason says whether the cap decided"


@pytest.mark.parametrize("value", ["-1", "1025", "None", "two"])
def test_what_is_no_cap_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["switch", "on", "--depth-cap", value]) == 2
    assert "expected none or an integer from 0 to 1024" in capsys.readouterr().err
