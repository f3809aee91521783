"""Servers: what is sent, what is read from streams and counters, and both commands end to end against a tiny one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.endpoints import fake

from draftproof.bench.endpoint import Counters, Endpoint, read_counters, tally_of
from draftproof.bench.load import Answer, Job, Load, play
from draftproof.bench.meter import Meter
from draftproof.bench.prove_url import compare
from draftproof.bench.sweep import Arm
from draftproof.bench.workload import Item
from draftproof.cli import run


def job(item: Item, tokens: int = 8) -> Job:
    return Job("on", Load(2), 0, 0, item, 1, tokens, 0.0)


def test_a_stream_becomes_an_answer() -> None:
    with fake() as server:
        client = Endpoint(server.url + "/v1/", extra={"ignore_eos": True, "top_logprobs": 2})
        chat = Item("1", "chat", ("hi", "more"), chat=True)
        found = list(play(client, [job(chat), job(Item("2", "ids", ((5, 6),)))], Load(2)))
        client.close()
        bodies = {str(body.get("prompt") or len(body["messages"])): body for body in server.bodies}
    assert [a.text for a in found] == ["abcdefgh"] * 3 and not any(a.error for a in found)
    assert all(a.tokens == 8 and sum(n for _, n in a.chunks) == 8 and len(a.chunks) == 4 for a in found)
    assert bodies["[5, 6]"]["logprobs"] == 2 and bodies["1"]["top_logprobs"] == 2 and bodies["1"]["ignore_eos"] is True
    assert bodies["3"]["messages"][1] == {"role": "assistant", "content": "abcdefgh"}, "the second turn has the first answer"
    tally = found[0].tally
    assert tally is not None and (tally.rounds_drafted, tally.drafted, tally.accepted) == (4, 8, 4)
    assert tally.passed == [3, 1] and tally.reached == [4, 3] and found[0].steps == (1, 2, 2, 3)
    assert len(found[0].logprobs) == 8


def test_what_a_line_asks_for_goes_into_the_request() -> None:
    asked = {"tools": [{"type": "function"}], "tool_choice": "required", "response_format": {"type": "json_object"}}
    call = {"role": "tool", "tool_call_id": "c", "content": "42"}
    with fake() as server:
        client = Endpoint(server.url)
        client.ask(job(Item("1", "chat", (call,), chat=True, asked=asked)))
        client.ask(job(Item("2", "text", ("x",), asked={"response_format": {"type": "json_object"}})))
    first, second = server.bodies
    assert first.items() >= asked.items() and first["messages"] == [call]
    assert second["response_format"] == {"type": "json_object"}


def test_plain_rounds_are_what_is_left_of_the_tokens() -> None:
    tally = tally_of({"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "acceptance_histogram": [0, 1, 1]}, 11)
    assert (tally.rounds, tally.rounds_drafted, tally.emitted, tally.completion_tokens) == (7, 2, 10, 11)


@pytest.mark.parametrize(("histogram", "reached", "hazard"), [
    ([2, 0, 0], [2], [0.0]), ([0, 0, 0], [], []), ([1, 1, 0, 0], [2, 1], [0.5, 0.0]),
])
def test_depths_that_no_draft_reached_are_not_counted(histogram: list[int], reached: list[int], hazard: list[float]) -> None:
    tally = tally_of({"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 0, "acceptance_histogram": histogram}, 5)
    assert tally.reached == reached and tally.hazard == hazard and len(tally.passed) == len(reached)
    assert (tally + tally).hazard == hazard


@pytest.mark.parametrize("engine", ["vllm:", "llamacpp:", "trtllm_", "draftproof:"])
def test_counters_of_every_engine(engine: str) -> None:
    text = (f'# TYPE x counter\n{engine}spec_decode_num_drafts_total{{engine="0"}} 10\n'
            f'{engine}spec_decode_num_drafts_total{{engine="1"}} 30\n'
            f"{engine}spec_decode_num_draft_tokens_total 120\n{engine}spec_decode_num_accepted_tokens_total 6e1\n"
            f'{engine}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 35\n')
    now = read_counters(text).since(read_counters(text.replace("30", "0").replace("120", "60").replace("6e1", "20").replace("35", "5")))
    assert now.as_json() == {
        "metrics_of": engine[:-1], "spec_decode_num_drafts": 30, "spec_decode_draft_tokens": 60, "spec_decode_accepted_tokens": 40,
        "spec_decode_acceptance_rate": pytest.approx(200 / 3), "spec_decode_acceptance_length": pytest.approx(1 + 4 / 3),
        "spec_decode_per_position_acceptance_rates": [1.0]}


def test_sglang_has_gauges() -> None:
    found = read_counters("sglang:spec_accept_length{tp=\"0\"} 2.5\nsglang:spec_accept_rate 0.5\nsglang:num_running_reqs 3").as_json()
    assert found == {"metrics_of": "sglang", "spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 50.0}


def test_ranks_that_have_not_guessed_are_not_in_the_average() -> None:
    """SGLang publishes zeros for a data-parallel rank that was idle; no round is shorter than one token."""
    idle, busy = (f'sglang:spec_accept_length{{dp_rank="{rank}"}} {length}\nsglang:spec_accept_rate{{dp_rank="{rank}"}} {rate}\n'
                  for rank, length, rate in ((0, 0.0, 0.0), (1, 3.0, 0.5)))
    assert read_counters(idle + busy).gauges == read_counters(busy).gauges == {"length": 3.0, "rate": 0.5}
    assert read_counters(idle).as_json() == {"metrics_of": "sglang"}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "x"])
def test_samples_that_are_no_numbers_are_left_out(value: str) -> None:
    found = read_counters(f"sglang:spec_accept_length {value}\nsglang:spec_accept_rate 0.5\nvllm:spec_decode_num_drafts_total {value}\n"
                          'vllm:spec_decode_num_draft_tokens_total{of="\u2028"} 4\r\n')
    assert (found.gauges, found.drafts, found.drafted) == ({"rate": 0.5}, None, 4.0)


MALFORMED = {
    "log-probabilities": {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": None}}]},
    "text": {"choices": [{"text": 7}]}, "choices": {"choices": 7}, "delta": {"choices": [{"delta": "a"}]}, "metrics": {"metrics": [1]},
    "usage": {"choices": [{"text": "a"}], "usage": {"completion_tokens": "many"}}, "usage's form": {"usage": [7]},
    "counts": {"choices": [{"text": "a"}], "metrics": {"speculative_decoding": {"acceptance_histogram": 7}}},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_whatever_a_server_answers_ends_the_request(what: str) -> None:
    with fake() as server:
        server.lines = f"data: {json.dumps(MALFORMED[what])}\n\ndata: [DONE]\n\n"
        client = Endpoint(server.url)
        found = client.ask(job(Item("1", "a", ("x",))))
        assert "Error: " in str(found.error) and found.ended_s >= found.sent_s
        client.close()


def test_a_malformed_answer_is_the_requests_error_and_not_the_end(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        server.malformed = "p1"
        assert run(["bench", "--url", server.url, "--workload", str(workload), "--tokens", "4", "--repeats", "1", "--most-repeats", "1",
                    "--json"]) == 0
    document = last_line(capsys)
    assert "; FAILED: 1 of 4 requests, the first of arm endpoint: TypeError: 'int' object is not iterable" in document["note"]
    cells = {cell["class"]: (cell["requests"], cell["failed"]) for cell in document["cells"]}
    assert cells == {"a": (2, 0), "b": (2, 1), "all": (4, 1)}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_stream_end_where_its_bytes_say(end: str) -> None:
    """JSON lets U+2028, U+2029 and U+0085 stand as they are."""
    text = "a\u2028b\u2029c\x85d"
    with fake() as server:
        event = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
        server.lines = end.join([f"data: {event}", "", 'data: {"choices": [], "usage": {"completion_tokens": 5}}'])     # no line end
        client = Endpoint(server.url)
        found = client.ask(job(Item("1", "a", ("x",))))
        client.close()
    assert (found.error, found.text, found.tokens) == (None, text, 5)


def stream(*choices: dict, done: bool = True, usage: int = 0) -> Answer:
    """What a client makes of a server's stream."""
    events = [{"choices": [{"index": 0, **choice}]} for choice in choices]
    events += [{"choices": [], "usage": {"completion_tokens": usage}}] if usage else []
    with fake() as server:
        server.lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")
        client = Endpoint(server.url)
        found = client.ask(job(Item("1", "a", ("x",), chat=True)))
        client.close()
    return found


@pytest.mark.parametrize(("deltas", "text"), [
    ([{"role": "assistant", "content": ""}, {"reasoning": "th"}, {"reasoning": "ink", "content": "so"}, {"content": "!"}], "thinkso!"),
    ([{"reasoning_content": "th", "reasoning": "th"}, {"content": None, "reasoning_content": "ink"}, {"content": "so"}], "thinkso"),
    ([{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
      {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, {"tool_calls": [{"function": {"arguments": ":1}"}}]}], 'f{"a":1}'),
])
def test_all_that_a_model_writes_is_timed_and_compared(deltas: list[dict], text: str) -> None:
    """Reasoning under either name, and calls: the first token is the first of these, not of the text behind."""
    found = stream(*({"delta": delta} for delta in deltas), usage=9)
    assert (found.error, found.text, len(found.chunks), found.tokens) == (None, text, 3, 9)


def test_a_stream_that_stops_in_the_middle_is_no_answer() -> None:
    first, last = {"delta": {"content": "ab"}}, {"delta": {"content": "c"}, "finish_reason": "stop"}
    assert "ended in the middle" in str(stream(first, done=False).error)
    assert [found.error for found in (stream(first, last, done=False), stream(first), stream(first, done=False, usage=2))] == [None] * 3


def test_counters_of_a_server_that_began_again_count_from_its_beginning() -> None:
    before, after = (read_counters(f"vllm:spec_decode_num_drafts_total {n}\nvllm:spec_decode_num_draft_tokens_total {3 * n}\n"
                                   f"vllm:spec_decode_num_accepted_tokens_total {2 * n}\n"
                                   f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {n}\n') for n in (100, 10))
    assert after.since(before) == after


@pytest.mark.parametrize("unread", [0, 1])
def test_what_a_server_counted_before_is_not_the_arms(unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two readings failed: a busy server, a gateway's 503."""
    with fake() as server:
        arm = Arm("on", "ngram", "auto", Endpoint(server.url))
        arm.client.ask(job(Item("1", "a", ("x",))))
        meter, told = Meter(), [arm.client.counters(), arm.client.counters()]
        told[unread] = None
        monkeypatch.setattr(arm.client, "counters", lambda: told.pop(0))
        with meter.around(arm, Load(1)):
            pass
        arm.client.close()
    assert meter.counted[arm.name, Load(1)] == Counters()


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "w.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{i}", "class": "ab"[i % 2], "answer": "c"}) for i in range(4)))
    return file


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_a_server_against_its_own_off(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        code = run(["bench", "--url", server.url, "--drafter", "ngram", "--depth", "3", "--workload", str(workload), "--tokens", "8",
                    "--concurrency", "1,2", "--most-repeats", "2", "--json"])
        asked = [body.get("speculation") for body in server.bodies]
    assert code == 0 and {"drafter": "ngram", "depth": 3} in asked and {"drafter": "none"} in asked
    document = last_line(capsys)
    cell = next(c for c in document["cells"] if c["arm"] == "ngram" and c["class"] == "all" and c["concurrency"] == 2)
    assert cell["identical"] is True and cell["requests"] == 8 and cell["failed"] == 0
    assert cell["acceptance_length_drafted"] == pytest.approx(7 / 4), "a text of 8 tokens has room for 7 after the first"
    assert cell["accepted_at"] == [0.75, 0.25] and cell["speedup"]["min"] <= cell["speedup"]["median"]
    assert cell["speedup"]["low"] is None, "four prompts have no interval"
    assert document["serving"][1]["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25]
    assert document["serving"][0]["metrics_of"] == "vllm" and document["serving"][0]["completed"] == 8


@pytest.mark.parametrize("silent", [True, False])
def test_what_a_server_counts_belongs_to_one_arm_under_one_load(silent: bool, workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        server.silent = silent
        assert run(["bench", "--url", server.url, "--drafter", "ngram", "--workload", str(workload), "--tokens", "8", "--each", "1",
                    "--concurrency", "1,2", "--repeats", "2", "--most-repeats", "2", "--json"]) == 0
    document = last_line(capsys)
    off, ngram = (document["serving"][place::2] for place in (0, 1))
    assert not any(key.startswith("spec_decode") for entry in off for key in entry)
    assert [(entry["spec_decode_num_drafts"], entry["spec_decode_draft_tokens"]) for entry in ngram] == [(16, 32)] * 2, "four answers each"


def test_an_answers_own_numbers_go_before_what_the_server_publishes(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its counters and averages know no requests: whoever else asks the server is among them."""
    with fake() as server:
        server.engine, server.gauges = "unknown:", "sglang:spec_accept_length 9\nsglang:spec_accept_rate 0.9\n"
        asked = ["bench", "--url", server.url, "--drafter", "ngram", "--workload", str(workload), "--tokens", "8", "--repeats", "1",
                 "--most-repeats", "1", "--json"]
        assert run(asked) == 0
        off, ngram = last_line(capsys)["serving"]
        assert not any(key.startswith("spec_decode") for key in off)
        assert (ngram["spec_decode_acceptance_length"], ngram["spec_decode_acceptance_rate"]) == (pytest.approx(7 / 4), 50.0)
        server.silent = True
        assert run(asked) == 0
        off, ngram = last_line(capsys)["serving"]
    assert not any(key.startswith("spec_decode") for key in off) and ngram["spec_decode_acceptance_length"] == 9


def test_a_server_without_off_has_no_speed_up(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        assert run(["bench", "--url", f"fast={server.url}", "--workload", str(workload), "--tokens", "4", "--repeats", "1",
                    "--most-repeats", "1", "--rate", "500", "--json"]) == 0
        document = last_line(capsys)
        assert {c["arm"] for c in document["cells"]} == {"fast"} and document["cells"][0]["speedup"] is None
        assert document["cells"][0]["load"] == "500/s" and document["cells"][0]["identical"] is None
        server.fail = True
        assert run(["bench", "--url", server.url, "--workload", str(workload)]) == 1
        assert "503" in capsys.readouterr().err
    assert run(["bench", "--url", server.url, "--workload", str(workload)]) == 1, "nobody listens any more"


@pytest.mark.parametrize(("wrong", "code", "word"), [(None, 0, ""), (("X", 0.01), 0, ""), (("X", 3.0), 3, "margin 3")])
def test_prove_a_server(workload: Path, wrong: tuple[str, float] | None, code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        server.wrong, server.only = wrong, "p0"
        arguments = ["prove", "--url", server.url, "--level", "run", "--workload", str(workload), "--tokens", "8", "--temperature", "0",
                     "--json"]
        assert run(arguments) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["passed"] is (code == 0) and word in " ".join(document["reasons"])
    found = [d for c in document["levels"]["run"]["comparisons"] for d in c["divergences"]]
    assert len(found) == (2 if wrong else 0) and all(d["at"] == 2 and d["token"] == "X" and d["expected"] == "c" for d in found)


@pytest.mark.parametrize(("wrong", "code"), [(None, 0), (("X", 0.01), 3)])
def test_prove_a_server_that_refuses_log_probabilities(wrong: tuple[str, float] | None, code: int, workload: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """TensorRT-LLM does while it guesses: texts are compared, and a difference has no margin that could excuse it."""
    with fake() as server:
        server.shy, server.wrong = True, wrong
        assert run(["prove", "--url", server.url, "--level", "run", "--workload", str(workload), "--tokens", "4",
                    "--temperature", "0"]) == code
    said = capsys.readouterr()
    assert "no margin is known: HTTP 400" in said.err and ("of 4 texts identical" in said.out) and ("unknown" in said.out) is (code == 3)


def test_prove_asks_only_what_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.jsonl").write_text(json.dumps({"turns": ["one", "two"]}))
    with fake() as server:
        assert run(["prove", "--url", server.url, "--level", "run", "--workload", str(tmp_path / "w.jsonl"), "--tokens", "4",
                    "--temperature", "0"]) == 0
        assert {len(body["messages"]) for body in server.bodies} == {1}
    capsys.readouterr()


def test_an_address_that_is_none_is_told(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--url", "http://[::1", "--workload", str(workload)]) == 1
    assert "http://[::1/v1/models: Invalid port" in capsys.readouterr().err


def test_prove_the_task_on_a_server(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text("\n".join([workload.read_text()] * 2))       # four of four lost may still be chance
    with fake() as server:
        asked = ["prove", "--url", server.url, "--level", "task", "--tasks", str(workload), "--tokens", "4", "--temperature", "0", "--json"]
        assert run(asked) == 0
        assert last_line(capsys)["levels"]["task"]["identical"] == 8
        server.wrong = ("X", 1.0)
        assert run(asked) == 3
        document = last_line(capsys)
    assert document["levels"]["task"]["lost"] == 8 and "WORSE" in document["reasons"][0]


LOGPROBS = (("Hel", -0.1, {}), ("lo", -0.2, {}))


@pytest.mark.parametrize("other", [{}, {"token_ids": (5, 6)}])
@pytest.mark.parametrize("one", [{"logprobs": LOGPROBS}, {"token_ids": (7, 6)}])
def test_two_servers_are_compared_by_what_both_tell(one: dict, other: dict) -> None:
    """Tokens of one against characters, or numbers, of the other differ at once, whatever the texts are."""
    def answer(text: str, told: dict) -> Answer:
        return Answer(Job("proof", Load(1), 0, 0, Item("0", "a", ("x",)), 0, 8, 0.0), 0.0, 1.0, text=text, **told)

    if "token_ids" in one and other:
        other = {"logprobs": LOGPROBS}
    for first, second in ((one, other), (other, one)):
        same = compare("x", 0.0, [answer("Hello", first)], [answer("Hello", second)])
        assert (same.identical, same.tokens, same.divergences) == (1, 5, ())
        (found,) = compare("x", 0.0, [answer("Hello", first)], [answer("Help", second)]).divergences
        assert (found.at, found.token, found.expected, found.margin) == (3, "l", "p", None)
