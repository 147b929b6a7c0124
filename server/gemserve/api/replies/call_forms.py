"""The forms in which models write calls of tools, as their chat templates do.

A form has an opener, and a generator that reads what follows it. It returns the calls in order, and
the text of calls of functions that are not there; None if that is no call at all.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemserve.api.replies.text_scanner import BROKEN, Steps, TextScanner
from gemserve.api.requests.tool_choice import ToolCallRules

_NAME = re.compile(r"[\w.:/-]")
_LOWER = re.compile("[a-z]")
_BRACE = re.compile("}")
_MOST_BRACES = 8  # too many of them
_LONGEST_NAME = 129
_LONGEST_HEAD = 256
_LONGEST_CODE = 1 << 14
_KEYS = frozenset(("name", "arguments", "parameters", "function", "type", "id"))
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class Call:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Items = list[Call | str]


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that an answer may call."""

    rules: ToolCallRules

    def call(self, name: object, arguments: object) -> Call | None:
        """A call; None for other functions, and for arguments that JSON cannot carry."""
        if isinstance(arguments, str):  # some models write a text of JSON
            arguments = _object_in(arguments)
        if name not in self.rules.names or not isinstance(arguments, dict):
            return None
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # an escape may name half a character
        except (TypeError, ValueError, RecursionError):  # Python's literals have sets and bytes
            return None
        return Call(str(name), written)

    def called(self, value: object, *, is_marked: bool) -> Call | None:
        """The call that a JSON value is. `is_marked`: behind a marker, where less will do.

        Without one, only a function that takes no arguments is called by its name alone.
        """
        outer: dict[str, Any] = value if isinstance(value, dict) else {}
        inner = outer.get("function")
        value = inner if isinstance(inner, dict) else outer
        rest = value.keys() - {"name", "id", "type"}
        if rest - set(_ARGUMENTS) or len(rest) > 1 or not isinstance(value.get("name"), str):
            return None
        name, arguments = value["name"], next((value[key] for key in rest), None)
        if arguments is None and (is_marked or self._may_be_empty(name, is_null=bool(rest))):
            arguments = {}
        return self.call(name, arguments)

    def _may_be_empty(self, name: str, *, is_null: bool) -> bool:
        """Is JSON without arguments a call? Not where another object may be the answer."""
        schema = (self.rules.parameters or {}).get(name, {})
        return not self.rules.is_held and (is_null or not schema.get("properties"))

    def typed(self, name: str, values: Mapping[str, str]) -> Call | None:
        """A call whose arguments are written as texts: the function says which of them are."""
        schema = (self.rules.parameters or {}).get(name, {})
        return self.call(name, {key: _value(schema, key, text) for key, text in values.items()})


@dataclass(frozen=True, slots=True)
class CallForm:
    """`closer` is taken where it is there: models leave it out, above all at an answer's end."""

    opener: str
    read: Callable[[TextScanner, Functions], Steps[Items | None]]
    closer: str = ""
    is_line: bool = False  # it counts at the beginning of a line only


def _value(schema: Mapping[str, Any], key: str, text: str) -> object:
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    if _is_text(wanted, schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _is_text(wanted: object, schema: Mapping[str, Any], depth: int = 0) -> bool:
    """Does a schema demand, or allow, a text?"""
    if not isinstance(wanted, dict) or depth > 8:
        return False
    kinds = wanted.get("type")
    if kinds is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    chosen = wanted.get("enum") or ([wanted["const"]] if "const" in wanted else [])
    if isinstance(chosen, list) and any(isinstance(each, str) for each in chosen):
        return True
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in wanted.get(key) or ()]
    if isinstance(reference := wanted.get("$ref"), str):
        definitions = schema.get(reference.split("/")[1] if "/" in reference else "")
        named = definitions if isinstance(definitions, dict) else {}
        inner.append(named.get(reference.rpartition("/")[2]))
    return any(_is_text(each, schema, depth + 1) for each in inner)


def _object_in(text: str) -> object:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return {} if value is None else value


def _take_object(s: TextScanner) -> Steps[object]:
    """The value of a JSON object, or `BROKEN`. Braces too many behind it are passed."""
    value = yield from s.take_json()
    if value is not BROKEN:
        yield from s.take_run(_BRACE, _MOST_BRACES)
    return value


def _objects(
    s: TextScanner, functions: Functions, *, is_marked: bool = True
) -> Steps[Items | None]:
    """Calls as JSON objects, one after the other."""
    items: Items = []
    while is_marked or (yield from _may_be_call(s, functions)):
        start = s.at
        value = yield from _take_object(s)
        if value is BROKEN:
            break
        call = functions.called(value, is_marked=is_marked)
        items.append(call or s.between(start, s.at))
        end = s.at
        yield from s.skip_blanks()
        yield from s.take_any((";", ","))
        yield from s.skip_blanks()
        if (yield from s.peek(1)) != "{":
            s.at = end
            return items
    if items:
        s.at = end
    return items or None


def _array(s: TextScanner, functions: Functions, *, is_marked: bool = True) -> Steps[Items | None]:
    """Calls in a JSON array."""
    items: Items = []
    s.at += 1
    while True:
        yield from s.skip_blanks()
        if not is_marked and not items and not (yield from _may_be_call(s, functions)):
            return None
        start = s.at
        is_object = (yield from s.peek(1)) == "{"
        value = (yield from _take_object(s)) if is_object else BROKEN
        if value is BROKEN:
            return None
        call = functions.called(value, is_marked=is_marked)
        items.append(call or s.between(start, s.at))
        yield from s.skip_blanks()
        mark = yield from s.take_any((",", "]"))
        if mark != ",":
            is_end = mark == "]" or (is_marked and (yield from s.peek(1)) == "")
            return items if is_end else None


def _may_be_call(s: TextScanner, functions: Functions) -> Steps[bool]:
    """Does the JSON here begin like a call of one of the functions? Stays in its place."""
    start = s.at
    found = yield from _begins_like_call(s, functions)
    if found:
        s.at = start
    return found


def _begins_like_call(s: TextScanner, functions: Functions) -> Steps[bool]:
    if not (yield from s.take("{")):
        return False
    yield from s.skip_blanks()
    if not (yield from s.take('"')):
        return False
    key = yield from s.take_run(_LOWER, 12)
    if key not in _KEYS or not (yield from s.take('"')):
        return False
    yield from s.skip_blanks()
    if not (yield from s.take(":")):
        return False
    if key != "name":
        return not functions.rules.is_held
    yield from s.skip_blanks()
    if not (yield from s.take('"')):
        return False
    name = yield from s.take_any([f'{name}"' for name in functions.rules.names])
    return name is not None


def _json(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    head = yield from s.peek(1)
    if head == "{":
        return (yield from _objects(s, functions))
    return (yield from _array(s, functions)) if head == "[" else None


def _tagged(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """Hermes, Qwen: JSON. Qwen3-Coder: `<function=`. GLM: a name, then its arguments."""
    yield from s.skip_blanks()
    head = yield from s.peek(1)
    if head in ("{", "["):
        return (yield from _json(s, functions))
    if head == "<":
        is_function = yield from s.take("<function=")
        return (yield from _function(s, functions)) if is_function else None
    return (yield from _name_and_arguments(s, functions))


def _function(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """`name>`, then JSON or `<parameter=key>value</parameter>`. Another one may follow."""
    items: Items = []
    start = s.at - len("<function=")
    while True:
        name = yield from s.take_until((">",), _LONGEST_NAME)
        if name is None:
            return None
        yield from s.skip_blanks()
        if (yield from s.peek(1)) == "{" or (yield from s.peek(4)) == "null":
            value = yield from _take_arguments(s)
            call = functions.call(name, value)
        else:
            values = yield from _parameters(s)
            if values is None:
                return None
            call = functions.typed(name, values)
        yield from _pass_ends(s, "</function>")
        items.append(call or s.between(start, s.at))
        end = s.at
        yield from s.skip_blanks()
        start = s.at
        if not (yield from s.take("<function=")):
            s.at = end
            return items


def _parameters(s: TextScanner) -> Steps[dict[str, str] | None]:
    values: dict[str, str] = {}
    while True:
        yield from s.skip_blanks()
        tag = yield from s.take_any(("<parameter=", "</function>", "</parameter>"))
        if tag == "</parameter>" and values:  # again
            continue
        if tag is None:  # the end may be missing, but only where the call ends
            is_end = (yield from s.peek(1)) == "" or (yield from s.peek(12)) == "</tool_call>"
            return values if is_end else None
        if tag != "<parameter=":
            return values if tag == "</function>" else None
        key = yield from s.take_until((">",), _LONGEST_HEAD)
        value = None if key is None else (yield from s.take_until(("</parameter>",)))
        if key is None or value is None:
            return None
        values[key] = value.removeprefix("\n").removesuffix("\n")


def _name_and_arguments(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    start = s.at
    name = yield from s.take_run(_NAME, _LONGEST_NAME)
    values: dict[str, str] = {}
    end = s.at
    yield from s.skip_blanks()
    while (yield from s.take("<arg_key>")):
        key = yield from s.take_until(("</arg_key>",), _LONGEST_HEAD)
        yield from s.skip_blanks()
        is_value = key is not None and (yield from s.take("<arg_value>"))
        value = (yield from s.take_until(("</arg_value>",))) if is_value else None
        if key is None or value is None:
            return None
        values[key.strip()] = value
        end = s.at
        yield from s.skip_blanks()
    if not name or not (values or (yield from s.peek(12)) == "</tool_call>"):
        return None
    s.at = end
    return [functions.typed(name, values) or s.between(start, end)]


def _python_tag(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """Llama: JSON, or `name.call(key="value")`."""
    yield from s.skip_blanks()
    if (yield from s.peek(1)) == "{":
        return (yield from _objects(s, functions))
    start = s.at
    code = yield from s.take_until(("<|eom_id|>", "<|eot_id|>"), _LONGEST_CODE, may_end=True)
    return None if code is None else _calls_in_code(s, functions, start, code)


def _calls_in_code(s: TextScanner, functions: Functions, start: int, code: str) -> Items | None:
    try:
        written = [call for line in ast.parse(code.strip()).body for call in _expressions(line)]
        items: Items = [
            functions.call(*_written_call(call)) or ast.unparse(call) for call in written
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    if any(isinstance(item, Call) for item in items):
        return items
    return [s.between(start, s.at)] if items else None


def _expressions(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError("no expression")
    found = line.value
    return found.elts if isinstance(found, (ast.List, ast.Tuple)) else [found]


def _written_call(found: ast.expr) -> tuple[str, dict[str, object]]:
    if not isinstance(found, ast.Call):
        raise ValueError("no call")
    if isinstance(found.func, ast.Name) and found.func.id == "print" and len(found.args) == 1:
        return _written_call(found.args[0])
    if found.args or any(keyword.arg is None for keyword in found.keywords):
        raise ValueError("arguments without names")
    name = ast.unparse(found.func).removesuffix(".call").removeprefix("default_api.")
    return name, {str(each.arg): ast.literal_eval(each.value) for each in found.keywords}


def _mistral(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """JSON, or `name[ARGS]{…}`."""
    yield from s.skip_blanks()
    if (yield from s.peek(1)) in ("{", "["):
        return (yield from _json(s, functions))
    start = s.at
    name = yield from s.take_run(_NAME, _LONGEST_NAME)
    if (yield from s.take("[CALL_ID]")):
        yield from s.take_run(_NAME, _LONGEST_NAME)
    yield from s.take("[ARGS]")
    yield from s.skip_blanks()
    return (yield from _arguments(s, functions, name, start))


def _arguments(s: TextScanner, functions: Functions, name: str, start: int) -> Steps[Items | None]:
    """The JSON of a call's arguments. The call began at `start`."""
    value = (yield from _take_arguments(s)) if name else BROKEN
    if value is BROKEN:
        return None
    return [functions.call(name, value) or s.between(start, s.at)]


def _take_arguments(s: TextScanner) -> Steps[object]:
    """An object; an empty one for `null`, or for nothing in front of an end mark."""
    head = yield from s.peek(1)
    if head == "{":
        return (yield from _take_object(s))
    return {} if (yield from s.take("null")) or head == "<" else BROKEN


def _deepseek(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    items: Items = []
    while True:
        end = s.at
        yield from s.skip_blanks()
        start = s.at
        if not (yield from s.take("<｜tool▁call▁begin｜>")):
            s.at = end
            return items or None
        name = yield from s.take_until(("<｜tool▁sep｜>",), _LONGEST_NAME)
        yield from s.skip_blanks()
        is_fenced = (yield from s.peek(1)) not in ("{", "<")
        if is_fenced:  # what stood in front is the kind of call, a function
            name = yield from s.take_until(("```",), _LONGEST_NAME)
            yield from s.take("json")
            yield from s.skip_blanks()
        found = yield from _arguments(s, functions, (name or "").strip(), start)
        if found is None:
            return None
        yield from s.skip_blanks()
        if is_fenced:
            yield from s.take("```")
        yield from s.take("<｜tool▁call▁end｜>")
        items += found


def _fenced(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """A block of code that is a call: JSON, another form, or Gemma's `tool_code`."""
    language = yield from s.take_run(_NAME, 32)
    yield from s.skip_blanks()
    start = s.at
    items: Items | None = None
    if language == "tool_code":
        code = yield from s.take_until(("```",), _LONGEST_CODE, may_end=True)
        return None if code is None else _calls_in_code(s, functions, start, code)
    head = yield from s.peek(1)
    if head in ("{", "["):
        items = yield from _bare(s, functions)
    elif head == "<":
        items = yield from _form_in_fence(s, functions)
    if items is None:
        return None
    yield from s.skip_blanks()
    is_closed = (yield from s.take("```")) or (yield from s.peek(1)) == ""
    return items if is_closed else None


def _form_in_fence(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    items: Items = []
    while opener := (yield from s.take_any([form.opener for form in _TAGGED])):
        form = next(form for form in _TAGGED if form.opener == opener)
        found = yield from read_form(s, functions, form)
        if found is None:
            return None
        items += found
        yield from s.skip_blanks()
    return items or None


def _bare(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    """JSON without a marker."""
    if (yield from s.peek(1)) == "[":
        return (yield from _array(s, functions, is_marked=False))
    return (yield from _objects(s, functions, is_marked=False))


def _bare_opened(s: TextScanner, functions: Functions) -> Steps[Items | None]:
    s.at -= 1  # the opener is a part of the JSON
    return (yield from _bare(s, functions))


def read_form(s: TextScanner, functions: Functions, form: CallForm) -> Steps[Items | None]:
    """What a form's opener is followed by, with its closer."""
    start = s.at - len(form.opener)
    items = yield from form.read(s, functions)
    if items is None:
        return None
    if form.closer:
        yield from _pass_ends(s, form.closer)
    if len(items) == 1 and isinstance(items[0], str):
        return [s.between(start, s.at)]  # of a function that is not there: the text as it was
    return items


def _pass_ends(s: TextScanner, closer: str) -> Steps[None]:
    """Pass end marks, which models repeat, and braces too many in front of them."""
    while True:
        end = s.at
        yield from s.skip_blanks()
        while (yield from s.take("}")):
            yield from s.skip_blanks()
        if not (yield from s.take(closer)):
            s.at = end
            return


_TAGGED = (
    CallForm("<tool_call>", _tagged, "</tool_call>"),
    CallForm("<function=", _function, "</tool_call>"),
    CallForm("<|python_tag|>", _python_tag, "<|eom_id|>"),
    CallForm("<｜tool▁calls▁begin｜>", _deepseek, "<｜tool▁calls▁end｜>"),
)
# a grammar allows these
HELD_FORMS = (_TAGGED[0], CallForm("{", _bare_opened, "</tool_call>", is_line=True))
FORMS = (
    *_TAGGED,
    CallForm("[TOOL_CALLS]", _mistral),
    CallForm("```", _fenced, is_line=True),
    CallForm("[", _bare_opened, is_line=True),
    HELD_FORMS[1],
)
