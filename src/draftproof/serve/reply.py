"""From what an engine says to what OpenAI's clients read: whole answers, and the chunks of a stream."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from ..engine.port import Completion, TokenEvent, TokenLogprob
from . import tools
from .numbers import extras, usage
from .translate import Order, Served

Groups = Sequence[Sequence[Completion]]      # of each prompt, its samples
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    order: Order
    served: Served


class Reply(Protocol):
    """One answer in the form of one endpoint. A stream is `first`, then `chunks` for every piece, then `last`, or `failed`."""

    done_mark: bool                          # whether the stream ends with data: [DONE]

    def whole(self, groups: Groups) -> dict[str, Any]: ...
    def first(self) -> list[dict[str, Any]]: ...
    def chunks(self, choice: int, events: Sequence[TokenEvent]) -> list[dict[str, Any]]: ...
    def last(self, groups: Groups) -> list[dict[str, Any]]: ...
    def failed(self, error: dict[str, Any]) -> dict[str, Any]: ...


def finish_of(finish: str | None) -> str | None:
    """OpenAI knows stop and length; a text that was cut off for another reason is cut at a length."""
    return "length" if finish in ("cancelled", "error") else finish


class CompletionReply:
    done_mark = True

    def __init__(self, head: Head) -> None:
        self.head = head
        self._offsets = [0] * head.order.choices
        self._characters = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._offsets]

    def whole(self, groups: Groups) -> dict[str, Any]:
        samples, groups = self.head.order.sampling.n, self._told(groups)
        choices = [self._choice(i * samples + done.sample, done) for i, group in enumerate(groups) for done in group]
        return {**self._object(choices), **_totals(self.head, groups)}

    def first(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        first, silent = events[0].round == -1, self.head.order.silent
        text, finish = "" if silent else "".join(event.text for event in events), finish_of(events[-1].finish)
        entries = [] if silent else [event.logprob for event in events if event.logprob is not None]
        if first and self.head.order.echo:
            text, entries = self._prompt(choice) + text, [*events[0].prompt_logprobs, *entries]
        if silent and finish:
            finish = "length"
        if not (text or finish or entries):
            return []
        logprobs = self._logprobs(choice, entries) if entries else None
        return [self._object([{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}], streamed=True)]

    def last(self, groups: Groups) -> list[dict[str, Any]]:
        if not self.head.order.include_usage:
            return []
        return [{**self._object([]), **_totals(self.head, self._told(groups))}]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        return {"error": error}

    def _told(self, groups: Groups) -> Groups:
        """The texts as far as they were asked for."""
        if not self.head.order.silent:
            return groups
        return [[replace(done, text="", token_ids=(), finish_reason="length", logprobs=None if done.logprobs is None else ())
                 for done in group] for group in groups]

    def _choice(self, choice: int, done: Completion) -> dict[str, Any]:
        text, logprobs = done.text, done.logprobs
        if self.head.order.echo:
            text = self._prompt(choice) + text
            logprobs = None if logprobs is None else (*(done.prompt_logprobs or ()), *logprobs)
        return {"index": choice, "text": text, "finish_reason": finish_of(done.finish_reason),
                "logprobs": None if logprobs is None else self._logprobs(choice, logprobs), **_of_prompt(self.head, done)}

    def _sent(self, choice: int, token: int) -> bytes:
        """What a special token writes: nothing, unless it stands in a prompt that was sent as text and is told again."""
        prompt = self._given(choice)
        spelled = _piece(self.head.served, token)
        stands = self.head.order.echo and isinstance(prompt, str) and prompt.startswith(spelled, self._offsets[choice])
        return spelled.encode() if stands else b""

    def _given(self, choice: int) -> str | tuple[int, ...]:
        return self.head.order.prompts[choice // self.head.order.sampling.n]

    def _prompt(self, choice: int) -> str:
        """The prompt of a choice as it was sent, or as its ids read."""
        prompt = self._given(choice)
        if isinstance(prompt, str):
            return prompt
        return "" if self.head.served.tokenizer is None else self.head.served.tokenizer.decode(prompt)

    def _object(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        out = {"id": self.head.id, "object": "text_completion", "created": self.head.created, "model": self.head.served.name,
               "system_fingerprint": self.head.served.fingerprint, "choices": choices}
        return {**out, "usage": None} if streamed and self.head.order.include_usage else out

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [_piece(self.head.served, entry.token_id) for entry in entries]
        offsets = [self._offset(choice, entry.token_id) for entry in entries]
        top = [None if entry.logprob is None else {token: entry.logprob, **self._likeliest(entry)}
               for token, entry in zip(tokens, entries, strict=True)]
        return {"tokens": tokens, "token_logprobs": [entry.logprob for entry in entries], "top_logprobs": top, "text_offset": offsets}

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float]:
        return {_piece(self.head.served, each.token): each.probability for each in reversed(entry.top)}

    def _offset(self, choice: int, token: int) -> int:
        """The character of the text at which the token begins; one that goes on with a character begins where that one does."""
        decoder = self._characters[choice]
        unfinished = decoder.getstate()[0]
        written = decoder.decode(_written(self.head.served, token) or self._sent(choice, token))
        offset = self._offsets[choice] + bool(unfinished and written.startswith("\ufffd"))       # what was unfinished stays so
        self._offsets[choice] += len(written)
        return offset


@dataclass(slots=True)
class _Held:
    """What of one choice may still become a call; once it cannot, its text flows."""

    text: str = ""
    entries: list[TokenLogprob] = field(default_factory=list)
    free: bool = False


class ChatReply:
    done_mark = True

    def __init__(self, head: Head) -> None:
        self.head = head
        self._held = [_Held(free=not head.order.tools) for _ in range(head.order.choices)]

    def whole(self, groups: Groups) -> dict[str, Any]:
        choices = [self._choice(done) for group in groups for done in group]
        return {**self._object("chat.completion", choices), **_totals(self.head, groups), **_of_prompt(self.head, groups[0][0])}

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(self.head.order.choices)]

    def chunks(self, choice: int, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        held, finish = self._held[choice], finish_of(events[-1].finish)
        held.text += "".join(event.text for event in events)
        held.entries += [event.logprob for event in events if event.logprob is not None]
        if not held.free and finish is None and tools.may_become_call(held.text):
            return []
        delta: dict[str, Any] = {"content": held.text} if held.text else {}
        calls, cut = ([], False) if held.free else tools.parse(held.text)
        if calls:
            delta = {"tool_calls": [{"index": i, **each} for i, each in enumerate(self._calls(choice, calls))]}
            finish = finish if cut else "tool_calls"
        entries, held.text, held.entries, held.free = held.entries, "", [], True
        out = [self._chunk(choice, delta, entries)] if delta or entries else []
        return [*out, self._chunk(choice, {}, finish=finish)] if finish else out

    def last(self, groups: Groups) -> list[dict[str, Any]]:
        if not self.head.order.include_usage:
            return []
        return [{**self._object("chat.completion.chunk", []), **_totals(self.head, groups)}]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        return {"error": error}

    def _choice(self, done: Completion) -> dict[str, Any]:
        calls, cut = tools.parse(done.text) if self.head.order.tools else ([], False)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else done.text, "refusal": None}
        if calls:
            message["tool_calls"] = self._calls(done.sample, calls)
        finish = "tool_calls" if calls and not cut else finish_of(done.finish_reason)
        return {"index": done.sample, "message": message, "finish_reason": finish,
                "logprobs": None if done.logprobs is None else self._logprobs(done.logprobs)}

    def _calls(self, choice: int, calls: Sequence[tools.Call]) -> list[dict[str, Any]]:
        name = self.head.id.rpartition("-")[2]
        return [{"id": f"call_{name}_{choice}_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(calls)]

    def _chunk(self, choice: int, delta: dict[str, Any], entries: Sequence[TokenLogprob] = (), finish: str | None = None) -> dict[str, Any]:
        body = {"index": choice, "delta": delta, "logprobs": self._logprobs(entries) if entries else None, "finish_reason": finish}
        out = self._object("chat.completion.chunk", [body])
        return {**out, "usage": None} if self.head.order.include_usage else out

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.head.id, "object": kind, "created": self.head.created, "model": self.head.served.name,
                "system_fingerprint": self.head.served.fingerprint, "choices": choices}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": [{**self._entry(entry.token_id, entry.logprob),
                             "top_logprobs": [self._entry(each.token, each.probability) for each in entry.top]} for entry in entries],
                "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelled = self.head.served.spell(token)
        return {"token": _piece(self.head.served, token), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}


class ResponsesReply:
    """The Responses API, text and calls: every event of a stream has a type and a number. Text flows once it cannot become a call."""

    done_mark = False

    def __init__(self, head: Head) -> None:
        self.head = head
        self._number = 0
        self._item = "msg_" + head.id.removeprefix("resp_")
        self._text = ""
        self._flows = not head.order.tools

    def whole(self, groups: Groups) -> dict[str, Any]:
        done = groups[0][0]
        calls, partly = tools.parse(done.text) if self.head.order.tools else ([], False)
        cut = finish_of(done.finish_reason) == "length" and (partly or not calls)
        status: Status = "incomplete" if cut else "completed"
        output = [self._call(i, call) for i, call in enumerate(calls)] or [self._message(done.text, status)]
        return {**self._response(status, output), "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "usage": self._usage(groups), **extras(self.head.order, groups)}

    def first(self) -> list[dict[str, Any]]:
        empty = self._response("in_progress", [])
        begun = [self._event("response.created", response=empty), self._event("response.in_progress", response=empty)]
        return [*begun, *self._opened()] if self._flows else begun

    def chunks(self, choice: int, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        text = "".join(event.text for event in events)
        self._text += text
        if self._flows:
            return self._delta(text)
        if tools.may_become_call(self._text):
            return []
        self._flows = True
        return [*self._opened(), *self._delta(self._text)]

    def last(self, groups: Groups) -> list[dict[str, Any]]:
        response = self.whole(groups)
        end = "response.completed" if response["status"] == "completed" else "response.incomplete"
        told = [event for i, item in enumerate(response["output"])
                for event in (self._closed(item) if item["type"] == "message" else self._called(i, item))]
        return [*told, self._event(end, response=response)]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})     # its own type has no place there

    def _opened(self) -> list[dict[str, Any]]:
        return [self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress")),
                self._event("response.content_part.added", **self._place(), part=_part(""))]

    def _delta(self, text: str) -> list[dict[str, Any]]:
        return [self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])] if text else []

    def _closed(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        late = [] if self._flows else [*self._opened(), *self._delta(self._text)]       # a call that was cut off
        return [*late, self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=_part(self._text)),
                self._event("response.output_item.done", output_index=0, item=message)]

    def _called(self, index: int, call: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"item_id": call["id"], "output_index": index}
        return [self._event("response.output_item.added", output_index=index, item={**call, "arguments": "", "status": "in_progress"}),
                self._event("response.function_call_arguments.delta", **place, delta=call["arguments"]),
                self._event("response.function_call_arguments.done", **place, name=call["name"], arguments=call["arguments"]),
                self._event("response.output_item.done", output_index=index, item=call)]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _message(self, text: str | None, status: Status) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _call(self, index: int, call: tools.Call) -> dict[str, Any]:
        name = f"{self.head.id.removeprefix('resp_')}_{index}"
        return {"id": f"fc_{name}", "type": "function_call", "status": "completed", "call_id": f"call_{name}", "name": call.name,
                "arguments": call.arguments}

    def _response(self, status: Status, output: list[dict[str, Any]]) -> dict[str, Any]:
        order, sampling = self.head.order, self.head.order.sampling
        told = {"instructions": None, "tools": [], "tool_choice": "auto" if order.tools else "none",
                "parallel_tool_calls": bool(order.tools), **order.told}
        return {"id": self.head.id, "object": "response", "created_at": self.head.created, "model": self.head.served.name,
                "status": status, "output": output, "error": None, "incomplete_details": None, "metadata": order.metadata or {},
                **told, "temperature": sampling.temperature, "top_p": sampling.top_p, "max_output_tokens": sampling.max_tokens,
                "store": False, "usage": None}

    def _usage(self, groups: Groups) -> dict[str, Any]:
        counts = usage(self.head.order, groups)
        return {"input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"]}


def _totals(head: Head, groups: Groups) -> dict[str, Any]:
    return {"usage": usage(head.order, groups), **extras(head.order, groups)}


def _of_prompt(head: Head, done: Completion) -> dict[str, Any]:
    """How likely the prompt's tokens are, and their ranks, as vLLM's clients read it, if they are asked for."""
    if not head.order.prompt_told:
        return {}
    return {"prompt_logprobs": [None if entry.logprob is None else _ranked(head.served, entry) for entry in done.prompt_logprobs or ()]}


def _ranked(served: Served, entry: TokenLogprob) -> dict[str, Any]:
    """By id, the likeliest first."""
    likely = [(each.token, each.probability, rank) for rank, each in enumerate(entry.top, 1)]
    return {str(token): {"logprob": value, "rank": rank, "decoded_token": _piece(served, token)}
            for token, value, rank in (*likely, (entry.token_id, entry.logprob, entry.rank))}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _written(served: Served, token: int) -> bytes:
    """What of a token is in the text: special ones have a piece to show, and write nothing."""
    if served.tokenizer is not None and not served.tokenizer.decode([token]):
        return b""
    spelled = served.spell(token)
    return _piece(served, token).encode() if spelled is None else spelled


def _piece(served: Served, token: int) -> str:
    return served.tokenizer.piece(token) if served.tokenizer is not None else f"token_id:{token}"
