"""From the messages and tools of a request to what chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from .errors import ApiError
from .schemas_chat import ChatRequest, Message, Tool, ToolChoice

OFFERS_TOOLS = "tools"
"""A template that offers tools reads the variable of this name."""


def template_messages(asked: ChatRequest) -> list[dict[str, Any]]:
    """Messages as templates know them: text and no parts, `system` for `developer`, arguments of calls as objects."""
    return [_message(message) for message in asked.messages]


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content or message.refusal or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def template_tools(asked: ChatRequest, templates: dict[str, str]) -> list[dict[str, Any]] | None:
    """The tools to offer; None where there are none, or none may be called.

    Raises:
        ApiError: 400; the model's chat template has no place for them.
    """
    if not asked.tools or asked.tool_choice == "none":
        return None
    template = templates.get("tool_use", templates.get("default", ""))
    if OFFERS_TOOLS not in template:
        raise ApiError(400, "the model's chat template has no place for tools", param="tools")
    return [{"type": "function", "function": _function(tool)} for tool in asked.tools]


def _function(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described = {"name": function.name, "description": function.description or ""}
    return {**described, "parameters": function.parameters or {"type": "object", "properties": {}}}


def output_form(asked: ChatRequest) -> dict[str, Any] | None:
    """`structured_outputs` for a response format, or for a call that must come.

    Raises:
        ApiError: 400; both are asked for.
    """
    forms: list[dict[str, Any]] = []
    if asked.response_format is not None and asked.response_format.type != "text":
        schema = asked.response_format.json_schema
        wanted = None if schema is None else schema.schema_
        forms.append({"json_object": True} if wanted is None else {"json": wanted})
    if isinstance(asked.tool_choice, ToolChoice):
        name = asked.tool_choice.function.name
        forms.append(_call_form([tool for tool in asked.tools or () if tool.function.name == name]))
    elif asked.tool_choice == "required":
        forms.append(_call_form(asked.tools or []))
    if asked.structured_outputs is not None:
        forms.append(asked.structured_outputs)
    if len(forms) > 1:
        raise ApiError(400, "of response_format, structured_outputs and a tool_choice that forces a call, give one")
    return forms[0] if forms else None


def _call_form(tools: list[Tool]) -> dict[str, Any]:
    """Of one call of one of the tools, as Llama 3.1 writes it."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"json": calls[0] if len(calls) == 1 else {"anyOf": calls}, "whitespace_pattern": " ?"}
