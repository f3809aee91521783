"""From what a client asks to what an engine is told: prompt ids, `Sampling`, a wish about speculation. No clock, no queue, no socket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from ..engine.admit import encode
from ..errors import DraftproofError, PromptError
from ..models.tokenizer import Tokenizer
from ..models.turns import folded
from ..types import Sampling
from . import tools
from .refusal import Refusal, of_validation
from .schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Function,
    FunctionCall,
    FunctionTool,
    InputItem,
    InputMessage,
    InputPart,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ResponsesRequest,
    ResultItem,
    Speculation,
    TextFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolName,
)
from .ticket import Ticket

CLASS = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
Structure = tuple[str, Mapping[str, Any] | None]         # the field that a grammar is from, and the grammar
SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")
WAYS = ("json", "regex", "choice", "grammar")           # of structured_outputs, and behind guided_
ONE = 1e-9               # a top_p that keeps the likeliest token alone


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the server, as far as its edge needs it. `spell` gives a token's bytes, None where they are not known."""

    name: str
    tokenizer: Tokenizer | None
    context: int
    vocab_size: int
    spell: Callable[[int], bytes | None]
    fingerprint: str
    drafter: str = "none"                                   # the spec that the server was started with
    versions: Mapping[str, str] = field(default_factory=dict)   # of target, template and engine
    exact: bool = False                                     # the load has shown that texts do not depend on speculation, to the bit


@dataclass(frozen=True, slots=True)
class Order:
    """One HTTP request, ready to run: every prompt is submitted by itself, with the same options."""

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    speculation: Mapping[str, Any] | None
    prompt_class: str | None
    stream: bool
    include_usage: bool = False
    tools: tuple[Tool, ...] = ()                            # those that may be called
    metadata: Mapping[str, str] | None = None
    user: str | None = None                                 # who asks, if the client says so
    told: Mapping[str, Any] = field(default_factory=dict)   # what the Responses API tells again
    echo: bool = False                                      # the answer begins with the prompt
    silent: bool = False                                    # and ends with it: the engine's one token is not told
    prompt_told: bool = False                               # how likely its tokens are stands apart
    structure: str = ""                                     # the field that the grammar is from

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n


@dataclass(frozen=True, slots=True)
class Headers:
    """What a client says beside the body; the body has the last word."""

    speculation: Mapping[str, Any] | None = None
    prompt_class: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Headers:
        """`X-Draftproof-Speculation: off` (or on, or a JSON object as in a body) and `X-Draftproof-Class: NAME`. Raises Refusal."""
        said, prompt_class = headers.get("x-draftproof-speculation"), headers.get("x-draftproof-class")
        wish: dict[str, Any] | None = None
        if said in ("off", "none"):
            wish = {"drafter": "none"}
        elif said not in (None, "on"):
            try:
                wish = Speculation.model_validate_json(said or "").model_dump(exclude_none=True)
            except ValidationError as error:
                raise Refusal(400, f"header X-Draftproof-Speculation: {of_validation(error)}; expected off, on or a JSON object",
                              param="X-Draftproof-Speculation") from None
        return cls(wish, _class(prompt_class, "header X-Draftproof-Class"))


def completion(request: CompletionRequest, headers: Headers) -> Order:
    if request.best_of not in (None, request.n or 1):
        raise Refusal(400, f"best_of={request.best_of}: every text is returned; leave it out, or give n={request.best_of}", param="best_of")
    silent = request.max_tokens == 0
    if silent and not request.echo:
        raise Refusal(400, "max_tokens=0 without echo: expected at least 1, or echo true for the prompt alone", param="max_tokens")
    prompt = request.prompt
    if isinstance(prompt, str):
        prompts: tuple[str | tuple[int, ...], ...] = (prompt,)
    elif prompt and isinstance(prompt[0], int):
        prompts = (tuple(_ids(prompt)),)
    else:
        prompts = tuple(one if isinstance(one, str) else tuple(_ids(one)) for one in prompt)   # type: ignore[arg-type]
    if request.echo and request.logprobs is not None and request.prompt_logprobs not in (None, request.logprobs):
        said = f"prompt_logprobs={request.prompt_logprobs} beside echo and logprobs={request.logprobs}"
        raise Refusal(400, f"{said}: expected the same number", param="prompt_logprobs")
    order = _order(request, headers, prompts, max_tokens=1 if silent else request.max_tokens, n=request.n, logprobs=request.logprobs,
                   structure=_structure(request, request.response_format), include_usage=_usage(request))
    if request.echo:
        order = replace(order, echo=True, silent=silent, sampling=replace(order.sampling, prompt_logprobs=request.logprobs))
    return _telling(order, request.prompt_logprobs)


def chat(request: ChatRequest, headers: Headers, served: Served) -> Order:
    """Raises Refusal for a conversation that the model's template does not take."""
    if request.top_logprobs and not request.logprobs:         # 0 is what vLLM's clients send by default
        raise Refusal(400, "top_logprobs without logprobs: set logprobs to true", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise Refusal(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    may_call = tools.chosen(request.tools, request.tool_choice)
    structure = _calling(request, may_call, _structure(request, request.response_format))
    prediction = "" if request.prediction is None else _text(request.prediction.content)
    order = _order(
        request, headers, (conversation(request.messages, served, may_call),), n=request.n,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None, structure=structure, include_usage=_usage(request),
        prediction=prediction, may_call=tuple(may_call))
    return _telling(order, request.prompt_logprobs)


def _telling(order: Order, count: int | None) -> Order:
    """With the prompt's log-probabilities, if they are asked for. Raises Refusal."""
    if count is None:
        return order
    if order.stream:
        raise Refusal(400, "prompt_logprobs with stream: they are told in whole answers; leave stream out, or use echo with logprobs",
                      param="prompt_logprobs")
    return replace(order, prompt_told=True, sampling=replace(order.sampling, prompt_logprobs=count))


def responses(request: ResponsesRequest, headers: Headers, served: Served) -> Order:
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        messages.append(Message(role="user", content=request.input))
    else:
        for item in request.input:
            _append(messages, item)
    may_call = tools.chosen(_listed(request.tools), _chosen(request.tool_choice))
    form = request.text.format if request.text else None
    prompt = conversation(messages, served, may_call, "input")
    order = _order(request, headers, (prompt,), max_tokens=request.max_output_tokens,
                   structure=_calling(request, may_call, _structure(request, form)), may_call=tuple(may_call))
    said = request.model_dump(exclude_none=True, include={"instructions", "tools", "tool_choice", "parallel_tool_calls"})
    return replace(order, told=said)


def _append(messages: list[Message], item: InputItem) -> None:
    """An item as a turn of a chat. Calls belong to the turn of the assistant before them."""
    if isinstance(item, InputMessage):
        messages.append(Message(role=item.role, content=_text(item.content)))
    elif isinstance(item, ResultItem):
        messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
    else:
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        last = messages.pop() if messages and messages[-1].role == "assistant" else Message(role="assistant", content="")
        messages.append(last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]}))


def _listed(listed: Sequence[FunctionTool] | None) -> list[Tool]:
    return [Tool(type="function", function=Function(**dict(one.model_dump(exclude={"type"})))) for one in listed or ()]


def _chosen(choice: str | NamedFunction | None) -> str | NamedTool | None:
    return NamedTool(type="function", function=ToolName(name=choice.name)) if isinstance(choice, NamedFunction) else choice


def _calling(request: ChatRequest | ResponsesRequest, may_call: Sequence[Tool], structure: Structure) -> Structure:
    """The structure of an answer that may be a call, too. Raises Refusal."""
    grammar = structure[1]
    if not may_call:
        return structure
    if grammar is not None and not {"json_schema", "json_object"} & grammar.keys():
        raise Refusal(400, "tools beside a structure that is not JSON: leave one of them out, or say tool_choice none", param="tools")
    must = request.tool_choice not in (None, "auto")
    answer = None if grammar is None else grammar.get("json_schema", ANY_OBJECT)
    return "tools", {"lark": tools.grammar(may_call, must, request.parallel_tool_calls is not False, answer)}


def read(tickets: Sequence[Ticket], served: Served) -> None:
    """Their texts become ids, so that the engine's thread has none to read. Raises PromptError, which ends the ticket, too."""
    for ticket in tickets:
        if ticket.sampling.prediction and isinstance(ticket.sampling.prediction, str) and served.tokenizer is not None:
            prediction = tuple(served.tokenizer.encode_plain(ticket.sampling.prediction))
            ticket.sampling = replace(ticket.sampling, prediction=prediction)
        try:
            ticket.prompt = encode(served, ticket.prompt)
        except PromptError as error:
            ticket.error = error
            raise


def conversation(messages: Sequence[Message], served: Served, may_call: Sequence[Tool], place: str = "messages") -> tuple[int, ...]:
    """The ids of a conversation, by the model's own template; `place` is where the client gave it. Raises Refusal."""
    if served.tokenizer is None or not served.tokenizer.has_chat_template:
        raise Refusal(400, f"model {served.name} has no chat template; use /v1/completions", param=place)
    turns = [_turn(message) for message in messages]
    knows_tools = served.tokenizer.takes_tools
    if may_call and not knows_tools:
        turns = folded(turns, served.tokenizer.knows)        # the tokenizer would do it behind what is explained here
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = tools.explained(may_call) + (first["content"] or "")
    listed = [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in may_call] if knows_tools else None
    try:
        return tuple(served.tokenizer.chat(turns, listed))
    except DraftproofError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0][:300] if type(error).__module__.startswith("jinja2") else "it failed on it"
        raise Refusal(400, f"the model's chat template does not take this conversation: {said}", param=place) from error


def _turn(message: Message) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise Refusal(400, f"messages: a turn of the {message.role} without content", param="messages")
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": _text(message.content or "")}
    if message.tool_calls:
        turn["tool_calls"] = [{"id": call.id, "type": "function", "function": call.function.model_dump()} for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    return turn


def _order(request: Common, headers: Headers, prompts: tuple[str | tuple[int, ...], ...], *, max_tokens: int | None,
           structure: Structure, n: int | None = None, logprobs: int | None = None, include_usage: bool = False,
           prediction: str = "", may_call: tuple[Tool, ...] = ()) -> Order:
    given: dict[str, Any] = {name: getattr(request, name) for name in SAME if getattr(request, name) is not None}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if request.top_p == 0:
        given["top_p"] = ONE
    if request.seed not in (None, -1):                                               # −1 is none, as vLLM has it
        given["seed"] = request.seed % (1 << 63)
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0)                                       # −1 is off, too
    if request.stop:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    sampling = Sampling(
        **given, bad_words=tuple(request.bad_words or ()), stop_token_ids=tuple(request.stop_token_ids or ()), n=n or 1, logprobs=logprobs,
        grammar=structure[1], prediction=prediction)
    metadata = request.metadata or {}
    said = metadata.get("prompt_class")
    return Order(prompts, sampling, _wish(request.speculation, headers), _class(said, "metadata.prompt_class") or headers.prompt_class,
                 bool(request.stream), include_usage, may_call, request.metadata,
                 request.user or request.safety_identifier or metadata.get("user"), structure=structure[0])


def _wish(body: Speculation | None, headers: Headers) -> Mapping[str, Any] | None:
    wish = {**(headers.speculation or {}), **(body.model_dump(exclude_none=True) if body is not None else {})}
    if wish.get("drafter") == "off":
        wish = {**wish, "drafter": "none"}
    return wish or None


def _structure(request: Common, form: ResponseFormat | TextFormat | None) -> Structure:
    """The grammar that an answer follows, as OpenAI's clients ask for it or as vLLM's do, behind the field that has it."""
    found = _grammar(form)
    asked = [] if found is None else [("text.format" if isinstance(form, TextFormat) else "response_format", found)]
    if request.structured_outputs is not None:
        said = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        if len(said) != 1:
            raise Refusal(400, f"structured_outputs with {' and '.join(said) or 'nothing'}: expected one of {', '.join(WAYS)}, json_object",
                          param="structured_outputs")
        asked += [("structured_outputs", _way(way, value)) for way, value in said.items()]
    guided = {way: getattr(request, f"guided_{way}") for way in WAYS}
    asked += [(f"guided_{way}", _way(way, value)) for way, value in guided.items() if value is not None]
    if len(asked) > 1:
        raise Refusal(400, f"{asked[0][0]} and {asked[-1][0]}: an answer follows one structure; leave one out", param=asked[-1][0])
    return asked[0] if asked else ("", None)


def _way(way: str, value: Any) -> dict[str, Any]:
    if way == "choice":
        return {"lark": "start: " + " | ".join(map(json.dumps, value))}
    return {{"json": "json_schema", "grammar": "lark"}.get(way, way): value}


def _grammar(form: ResponseFormat | TextFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    place = "text.format" if isinstance(form, TextFormat) else "response_format"
    if form.type != "json_schema":
        said = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        if said:
            raise Refusal(400, f"{place} of type {form.type} with {', '.join(said)}, which would have no effect; expected type "
                          "json_schema, or leave it out", param=place)
        return None if form.type == "text" else {"json_object": True}
    schema = form.schema_ if isinstance(form, TextFormat) else form.json_schema.schema_ if form.json_schema else None
    if schema is None:
        raise Refusal(400, f"{place} json_schema without its schema", param=place)
    return {"json_schema": schema}


def _usage(request: CompletionRequest | ChatRequest) -> bool:
    if request.stream_options is not None and not request.stream:
        raise Refusal(400, "stream_options without stream: set stream to true", param="stream_options")
    return bool(request.stream_options and request.stream_options.include_usage)


def _class(said: str | None, place: str) -> str | None:
    if said is not None and not CLASS.fullmatch(said):
        raise Refusal(400, f"{place}: expected 1 to 64 letters, digits or any of _ . -", param="prompt_class")
    return said


def _text(content: str | Sequence[TextPart | InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _ids(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]
