"""Renderings by code, for tokenizers that come without a chat template.

Each yields pieces that are tokenised one by one: structure as special tokens, all that people and
tools wrote as plain text, so that no text can pass for structure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moejax.config import ConfigError

Record = dict[str, Any]
PROMPT = -1


class Piece(NamedTuple):
    """A part of a rendered conversation.

    Attributes:
      text: a text, or the name of a special token; "" with `special` is the end of a document.
      special: whether it is one token.
      turn: number of the assistant turn that wrote it, counted from 0 over the record; -1: none.
    """

    text: str
    special: bool = False
    turn: int = PROMPT


Format = Callable[[Record], Iterator[Piece]]
END = Piece("", special=True)


def plain_format(record: Record) -> Iterator[Piece]:
    """For tokenizers that know no special token but the end: every answer closes with it."""
    turn = 0
    for place, message in enumerate(record["messages"]):
        if message.get("tool_calls"):
            raise ConfigError(
                f"messages[{place}].tool_calls need a tokenizer with a chat template."
            )
        yield Piece(f"{chr(10) if place else ''}### {message['role']}\n")
        if message["role"] == "assistant":
            yield Piece(message["content"], turn=turn)
            yield END._replace(turn=turn)
            turn += 1
        else:
            yield Piece(message["content"])


def kimi_format(record: Record) -> Iterator[Piece]:
    """The turns of Kimi-K2 and Kimi-Linear: a role's token, its name, the text, `<|im_end|>`.

    Source: the chat template published with Kimi-K2-Instruct, without its default system message.
    """
    if record["tools"]:
        raise ConfigError("tools need the tokenizer's chat template.")
    turn = 0
    for place, message in enumerate(record["messages"]):
        role = message["role"]
        if message.get("tool_calls"):
            raise ConfigError(f"messages[{place}].tool_calls need the tokenizer's chat template.")
        opens = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>")
        yield Piece(opens, special=True)
        yield Piece(message.get("name") or role)
        yield Piece("<|im_middle|>", special=True)
        own = turn if role == "assistant" else PROMPT
        yield Piece(message["content"], turn=own)
        yield Piece("<|im_end|>", special=True, turn=own)
        turn += role == "assistant"


# What the released tokenizer asks for unless it is told.
_EFFORT = "max"
_EFFORTS = ("low", "high", "max")
_EFFORT_NOTE = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)


def k3_format(record: Record) -> Iterator[Piece]:
    """Kimi-K3's tagged text: `<|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>`.

    A message is a tag and `<|end_of_msg|>`. An answer holds the channels `think`, `response` and
    `tools`. The prompt opens its first channel, so what is learned begins behind that. A record is
    rendered with thinking where one of its answers has reasoning, or where
    `chat_template_kwargs.thinking` says so; then it begins with a note on the effort.

    Source: `encoding_k3.py` as published with Kimi-K3, which has no template file.
    """
    messages, kwargs = _in_call_order(record["messages"]), record["kwargs"]
    thinks = any(message.get("reasoning_content", "").strip() for message in messages)
    thinking = bool(kwargs.get("thinking", thinks))
    if record["tools"]:
        yield from _note("tool-declare", _declared("# Tools\nHere are the available tools", record))
    if thinking and (effort := kwargs.get("thinking_effort", _EFFORT)):
        if effort not in _EFFORTS:
            raise ConfigError(f"thinking_effort={effort!r} is none of {', '.join(_EFFORTS)}.")
        yield from _note("thinking-effort", _EFFORT_NOTE.format(effort))
    turn = index = 0
    calls: Sequence[dict[str, Any]] = ()
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            yield from _answer(message, thinking, turn)
            turn, index, calls = turn + 1, 0, message.get("tool_calls", ())
            continue
        attributes = [("role", role)]
        if role == "tool":
            index += 1
            attributes += [("tool", _tool_name(message, calls, index, place)), ("index", index)]
        elif role not in ("user", "system"):
            raise ConfigError(f"messages[{place}].role={role!r} is none that Kimi-K3 knows.")
        elif message.get("name"):
            attributes.append(("name", message["name"]))
        yield from _open("message", attributes)
        yield Piece(message["content"])
        yield from _close("message")
        yield Piece("<|end_of_msg|>", special=True)


def _open(tag: str, attributes: Sequence[tuple[str, Any]] = (), turn: int = PROMPT):
    yield Piece("<|open|>", True, turn)
    yield Piece(tag, turn=turn)
    for key, value in attributes:
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        yield Piece(f' {key}="{escaped}"', turn=turn)
    yield Piece("<|sep|>", True, turn)


def _close(tag: str, turn: int = PROMPT) -> Iterator[Piece]:
    yield Piece("<|close|>", True, turn)
    yield Piece(tag, turn=turn)
    yield Piece("<|sep|>", True, turn)


def _note(kind: str, text: str) -> Iterator[Piece]:
    """A message of the system's own."""
    yield from _open("message", [("role", "system"), ("type", kind)])
    yield Piece(text)
    yield from _close("message")
    yield Piece("<|end_of_msg|>", special=True)


def _declared(heading: str, record: Record) -> str:
    tools = json.dumps(_sorted(record["tools"]), ensure_ascii=False, separators=(",", ":"))
    return f"{heading}, described in JSONSchema.\n\n```json\n{tools}\n```"


def _sorted(value: Any) -> Any:
    """The value with the keys of every object in order."""
    if isinstance(value, dict):
        return {key: _sorted(inner) for key, inner in sorted(value.items())}
    return [_sorted(inner) for inner in value] if isinstance(value, list) else value


def _answer(message: dict[str, Any], thinking: bool, turn: int) -> Iterator[Piece]:
    """An assistant's message; its tag and that of its first channel belong to the prompt."""
    yield from _open("message", [("role", "assistant")])
    if thinking:
        yield from _open("think")
        reasoning = message.get("reasoning_content", "")
        yield Piece(reasoning if reasoning.strip() else "", turn=turn)
        yield from _close("think", turn)
    yield from _open("response", turn=turn if thinking else PROMPT)
    yield Piece(message.get("content", ""), turn=turn)
    yield from _close("response", turn)
    if calls := message.get("tool_calls"):
        yield from _open("tools", turn=turn)
        for index, call in enumerate(calls, start=1):
            yield from _call(call.get("function", call), index, turn)
        yield from _close("tools", turn)
    yield from _close("message", turn)
    yield Piece("<|end_of_msg|>", True, turn)


def _call(function: dict[str, Any], index: int, turn: int) -> Iterator[Piece]:
    yield from _open("call", [("tool", function["name"]), ("index", index)], turn)
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:  # kept as it was written
            yield from _open("json", [("type", "object")], turn)
            yield Piece(arguments, turn=turn)
            yield from _close("json", turn)
            arguments = {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"the arguments of the tool call {function['name']} are no JSON object.")
    for key, value in arguments.items():
        yield from _open("argument", [("key", key), ("type", _kind(value))], turn)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield Piece(text, turn=turn)
        yield from _close("argument", turn)
    yield from _close("call", turn)


def _kind(value: Any) -> str:
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (dict, "object"))
    known = (name for kind, name in kinds if isinstance(value, kind))
    return "null" if value is None else next(known, "array")


def _tool_name(message: dict[str, Any], calls: Sequence[Any], index: int, place: int) -> str:
    name = message.get("tool", message.get("name"))
    if name is None and index <= len(calls):
        call = calls[index - 1]
        name = call.get("function", call)["name"]
    if name is None:
        raise ConfigError(f"messages[{place}] answers no tool call and has no name.")
    return name


def _in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with every run of tool results in the order of the calls they answer.

    A run in which one result names no call stays as it is.
    """
    out: list[dict[str, Any]] = []
    by_id: dict[str, tuple[int, str]] = {}
    run: list[tuple[int, dict[str, Any]]] = []

    def flush() -> None:
        if all(position >= 0 for position, _ in run):
            run.sort(key=lambda item: item[0])
        out.extend(result for _, result in run)
        run.clear()

    for message in messages:
        if message["role"] == "tool":
            position, name = by_id.get(
                str(message.get("tool_call_id", message.get("id"))), (-1, "")
            )
            run.append((position, message if position < 0 else message | {"tool": name}))
            continue
        flush()
        if message["role"] == "assistant":
            by_id = {}
            for position, call in enumerate(message.get("tool_calls", ())):
                name = call.get("function", call)["name"]
                by_id.setdefault(str(call.get("id")), (position, name))
        out.append(message)
    flush()
    return out
