"""What a client may send. Nothing is silently ignored: an unknown field is refused by its name, and everything has a limit.

Field names and meanings are OpenAI's (Completions, Chat Completions, Responses); what vLLM's clients add to them (top_k, min_p,
repetition_penalty, stop_token_ids, …) is taken too, and what those of other servers send by default where it changes nothing. `user`
and `safety_identifier` only keep a user in one arm of an experiment.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

MAX_N = 32
MAX_TOKENS = 1 << 20
MAX_PROMPTS = 32
MAX_MESSAGES = 2048
MAX_STOP, MAX_STOP_CHARS = 16, 256
MAX_LOGPROBS = 20
MAX_BIAS = 1024
MAX_IDS = 1 << 20
MAX_TOOLS = 64
MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH = 1 << 16, 32
MAX_DEPTH = 64                          # of a draft


def _small(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        if _levels(value) > MAX_SCHEMA_DEPTH:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels")
        size = len(json.dumps(value))
        if size > MAX_SCHEMA_CHARS:
            raise ValueError(f"{size} characters of JSON; expected at most {MAX_SCHEMA_CHARS}")
    return value


def _levels(value: Any) -> int:
    """Nesting of a JSON value, without recursion."""
    deepest, heap = 0, [(value, 1)]
    while heap:
        item, level = heap.pop()
        deepest = max(deepest, level)
        if level <= MAX_SCHEMA_DEPTH and isinstance(item, dict | list):
            heap += [(inner, level + 1) for inner in (item.values() if isinstance(item, dict) else item)]
    return deepest


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIAS:        # before each of them is looked at
        raise ValueError(f"{len(value)} tokens; expected at most {MAX_BIAS}")
    return value


def _object(value: Any) -> Any:
    """As vLLM has schemas: an object, or its text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


JsonSchema = Annotated[dict[str, Any], AfterValidator(_small)]
JsonText = Annotated[JsonSchema, BeforeValidator(_object)]
Rules = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SCHEMA_CHARS)]     # a regex, or Lark
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]      # a model may be served by its path
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Empty = Annotated[list[Any], Field(max_length=0)]
Choices = Annotated[list[StopText], Field(min_length=1, max_length=MAX_BIAS, fail_fast=True)]
Short = Annotated[str, StringConstraints(max_length=512)]
TOKEN_ID = "Token id"
Id = Annotated[int, Field(ge=0, lt=1 << 31, title=TOKEN_ID)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


def _form(prompt: Any) -> str | None:
    """What a prompt begins with says which form it has: a mistake further on is then told as what it is."""
    if isinstance(prompt, list):
        first = prompt[0] if prompt else ""
        inner = "list[int]" if isinstance(first, list) else type(first).__name__ if isinstance(first, int | str) else "nothing"
        return f"list[{inner.replace('bool', 'int')}]"
    return "str" if isinstance(prompt, str) else None


Prompt = Annotated[
    Annotated[str, Tag("str")] | Annotated[Ids, Tag("list[int]")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list[str]")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list[list[int]]")],
    Discriminator(_form, "prompt_form", "expected a text, token ids, or a list of texts or of lists of ids")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Speculation(Strict):
    """How this one request is guessed ahead. drafter: `none` (or `off`), or the server's own."""

    drafter: Annotated[str, StringConstraints(max_length=1024)] | None = None
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | Literal["auto"] | None = None
    rule: Literal["match", "ratio", "block", "lossy-typical"] | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    type: Literal["content"]
    content: str | list[TextPart]


class SchemaFormat(Strict):
    name: Short | None = None
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Strict):
    """One of these."""

    json_: JsonText | None = Field(None, alias="json")
    regex: Rules | None = None
    choice: Choices | None = None
    grammar: Rules | None = None
    json_object: Literal[True] | None = None


class Common(Strict):
    """What all three request forms share."""

    model: Name | None = None                    # the one that is served
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: Annotated[dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-1e9, le=1e9)]],
                          Field(max_length=MAX_BIAS), BeforeValidator(_few)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_STOP)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop: Annotated[str, StringConstraints(max_length=MAX_STOP_CHARS)] | Annotated[list[StopText], Field(max_length=MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOP)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-1 << 63, lt=1 << 63)] | None = None
    stream: bool | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    speculation: Speculation | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonText | None = None                     # of older clients, as are the next three
    guided_regex: Rules | None = None
    guided_choice: Choices | None = None
    guided_grammar: Rules | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None       # of beams


class CompletionRequest(Common):
    """echo: the text begins with the prompt, and its log-probabilities too; max_tokens 0 is then nothing else. prompt_logprobs: they stand
    apart, as vLLM's clients read them."""

    prompt: Prompt
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Literal[""] | None = None


class FunctionCall(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    id: Short
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, lt=MAX_TOOLS)] | None = None          # a stream tells it; the place in the list counts


class Message(Strict):
    """One turn. Text only: parts of other types (images, audio, files) are refused, and nothing is ever fetched."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Short | None = None
    # What answers hold beside it, so that they can be sent back as they came.
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None
    annotations: Empty | None = None


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ToolName(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: ToolName


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    store: Literal[False] | None = None


class InputPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    # What answers hold beside it, here and below, so that they can be sent back as they came.
    annotations: Empty | None = None
    logprobs: Empty | None = None


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    id: Short | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


class Item(Strict):
    call_id: Short
    id: Short | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    namespace: None = None
    caller: None = None


class CalledItem(Item):
    type: Literal["function_call"]
    name: FunctionName
    arguments: str


class ResultItem(Item):
    """What a call came to."""

    type: Literal["function_call_output"]
    output: str | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    name: None = None


ITEMS = {"message": "Message", "function_call": "Called", "function_call_output": "Result"}    # capitals: no step in a client's place


def _item(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return ITEMS.get(kind) if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")] | Annotated[CalledItem, Tag("Called")] | Annotated[ResultItem, Tag("Result")],
    Discriminator(_item, "input_item", "expected a message, a function_call or a function_call_output")]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class NamedFunction(ToolName):
    type: Literal["function"]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None


# What answers of text and calls have none of, so that it may be asked for.
Nowhere = Literal["reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
                  "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"]


class ResponsesRequest(Common):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Nowhere], Field(max_length=16)] | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    reasoning: None = None


class TokenizeRequest(Strict):
    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: Annotated[list[Id], Field(max_length=MAX_IDS, fail_fast=True)]


class SwitchRequest(Strict):
    """PUT /draftproof/speculation. A field that is absent stays as it is; `depth_cap: null` takes the cap away.

    A drafter given here is the server's own, none, or one that needs no files.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    enabled: bool | None = None
    depth_cap: Annotated[int, Field(ge=0, le=1024)] | None = None
    drafter: Annotated[str, StringConstraints(max_length=1024)] | None = None


class AbRequest(Strict):
    """PUT /draftproof/ab. end: nobody takes part in the experiment any more; restart: from the first stage, with empty books."""

    action: Literal["end", "restart"]
