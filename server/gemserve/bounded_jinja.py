"""Chat templates in transformers' sandbox, with bounds on time and on what they make.

Templates come with models, and what they loop over comes from clients. The sandbox keeps a template
from the machine, but not from looping for hours or from filling the memory. Here every iteration,
call, filter and operator looks at the clock, and every text and list that is made is counted. What
makes many characters of few is counted before it is called. A list counts with all that it holds,
so whatever reads values, compares or writes them has an end. Templates see what transformers gives
to them, without `_NEEDLESS`, which no chat needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

MOST_S = 5.0  # of processor time of one rendering
MOST_CHARACTERS = 1 << 28  # of all texts that one rendering makes, and those of the longest one:
MOST_AT_ONCE = 1 << 25
_ITEM, _BIT = 16, 1 << 11  # how many characters an item of a list, and a bit of an integer, count
_LOOK_S = 0.001  # how often the clock of the processor is read, which takes a microsecond
_NEEDLESS = {"lipsum", "pprint", "striptags", "urlize", "wordwrap", "xmlattr", "encode"}
_LISTS = (list, tuple, dict)


class TemplateLimit(Exception):
    """A rendering has reached a limit, which the message names."""


class _Budget:
    """What one rendering has used."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._ends_s, self._look_s = check, time.thread_time() + MOST_S, 0.0
        self._characters = 0
        # of lists, by id; each with its list, so that no other one gets the same id
        self._sizes: dict[int, tuple[Any, tuple[int, int]]] = {}

    def step(self) -> None:
        """Look at the clock, at each iteration and call."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        self._check()
        if time.thread_time() > self._ends_s:
            raise TemplateLimit(f"it takes longer than {MOST_S:g} s of processor time")

    def fit(self, characters: int) -> None:
        """Refuse what is about to be made, or was made, if it is too long."""
        if characters > MOST_AT_ONCE:
            raise TemplateLimit(f"it makes a text of more than {MOST_AT_ONCE:,} characters")

    def made(self, value: Any) -> Any:
        """Count what was made, and refuse it if it is too long."""
        if isinstance(value, int):
            self.fit(value.bit_length() * _BIT)
        elif isinstance(value, (str, bytes, *_LISTS)):
            self._characters += len(value) * (_ITEM if isinstance(value, _LISTS) else 1)
            if self._characters > MOST_CHARACTERS:
                raise TemplateLimit(f"it makes texts of more than {MOST_CHARACTERS:,} characters")
            self.fit(self.size(value))
        return value

    def size(self, value: Any) -> int:
        """About how many characters an item of a list has when it is written."""
        return self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """The characters of what is written, and its lines if it is indented."""
        if isinstance(value, (str, bytes)):
            return len(value), 1
        if isinstance(value, int):
            return value.bit_length() // 3, 1
        if value is None or isinstance(value, (float, Undefined)):
            return 0, 1
        if not isinstance(value, _LISTS):
            raise TemplateLimit(f"it makes lists of {type(value).__name__}")  # may hold anything
        if id(value) not in self._sizes:
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            self.fit(_ITEM * len(parts))
            measured = [self._measure(part) for part in parts]
            lines = 1 + sum(lines for _, lines in measured)
            size = sum(size for size, _ in measured) + _ITEM * lines  # each is indented once more
            self._sizes[id(value)] = value, (size, lines)
        return self._sizes[id(value)][1]


_budget: ContextVar[_Budget] = ContextVar("budget")


def render(source: str, variables: Mapping[str, Any], check: Callable[[], None]) -> str:
    """What a template writes.

    `check` is called again and again, and may raise. Raises `TemplateLimit`, what Jinja raises, and
    whatever the template raises.
    """
    token = _budget.set(_Budget(check))
    try:
        return _compiled(source).render(variables)
    finally:
        _budget.reset(token)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts what templates do."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what was written."""
        budget, taken, length = _budget.get(), list[str](), 0
        for part in parts:
            length += len(part)
            budget.fit(length)
            taken.append(part)
        return str(budget.made("".join(taken)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Rewriter().visit(template)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NEEDLESS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **fields: Any) -> Any:
        budget, name = _budget.get(), getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        for each in (*args, *fields.values()):  # which a macro has as a list
            if isinstance(each, _LISTS):
                budget.fit(budget.size(each))
        of = (owner,) if isinstance(owner, (str, bytes, int)) else ()
        values = _counted(name if of or name == "strftime_now" else "", (*of, *args), fields)
        return budget.made(super().call(__context, __obj, *values[len(of) :], **fields))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        if value.__name__ == "format_map":
            return lambda fields: _Formatter(self).vformat(value.__self__, (), fields)
        return lambda *args, **fields: _Formatter(self).vformat(value.__self__, args, fields)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "%" and isinstance(left, (str, bytes)):
            values = right if isinstance(right, tuple) else (right,)
            budget.fit(_growth("format", (left, *values), {}))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.fit(left.bit_length() * right * _BIT)
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(count, int):
                    budget.fit(len(items) * count * (1 if isinstance(items, str) else _ITEM))
        return budget.made(super().call_binop(context, operator, left, right))


@cache
def _environment() -> _Environment:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template("").environment
    made = _Environment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        optimized=False,  # nothing is counted while a template is compiled, so nothing is computed
        extensions=[type(each) for each in theirs.extensions.values()],
        finalize=_written,
    )
    filters = {name: _bounded(name, each) for name, each in theirs.filters.items()}
    filters["join"] = _bounded("join_items", theirs.filters["join"])  # the method has another order
    filters |= {"bounded_loop": _loop, "bounded_list": lambda items: _budget.get().made(items)}
    made.filters = {name: each for name, each in filters.items() if name not in _NEEDLESS}
    made.globals = {name: each for name, each in theirs.globals.items() if name not in _NEEDLESS}
    # or namespaces within namespaces would all be written; the class is of this environment only
    theirs.globals["namespace"].__repr__ = object.__repr__
    return made


class _Formatter(SandboxedFormatter):
    """`str.format`, each field of which is counted."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _budget.get().fit(_numbers(format_spec))
        return _budget.get().made(super().format_field(value, format_spec))


class _Rewriter(NodeTransformer):
    """Lets a template count what Jinja's sandbox leaves to Python."""

    def visit(self, node: nodes.Node, *args: Any, **fields: Any) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "bounded_loop")
        if isinstance(node, nodes.Concat):
            return _filtered(_filtered(nodes.List(node.nodes), "bounded_list"), "join")
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        is_part = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_list = isinstance(node, (nodes.List, nodes.Dict))
        return _filtered(node, "bounded_list") if is_list or is_tuple or is_part else node


def _filtered(node: Any, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _loop(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop."""
    budget = _budget.get()
    for item in items:
        budget.step()
        budget.fit(budget.size(item))
        yield item


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or the environment

    @wraps(function)  # with the attribute that says what Jinja passes first
    def bounded(*args: Any, **fields: Any) -> Any:
        values = _counted(name, args[skipped:], fields)
        made = function(*args[:skipped], *values, **fields)
        return _loop(made) if isinstance(made, Iterator) else _budget.get().made(made)

    return bounded


def _counted(name: str, values: tuple[Any, ...], fields: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or method, if what it makes is not too long."""
    budget = _budget.get()
    budget.step()
    if name in ("join", "join_items"):  # what comes one by one is counted first
        values = tuple(
            budget.made(list(_loop(e))) if isinstance(e, Iterator) else e for e in values
        )
    budget.fit(_growth(name, values, fields))
    return values


def _growth(name: str, values: tuple[Any, ...], fields: dict[str, Any]) -> int:
    """About how many characters a filter or a method makes that can make many of few."""
    value, rest = values[0] if values else "", values[1:]

    def widest() -> int:
        """The largest number among the arguments, or the length of the longest text."""
        each = (e if isinstance(e, int) else len(str(e)) for e in (*rest, *fields.values()))
        return max(each, default=0)

    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes":
            return widest()
        case "batch" | "slice":
            return widest() * _ITEM
        case "round":  # to so many digits
            return widest() << 13
        case "tojson":  # whose lines may all be indented
            return widest() << 21
        case "expandtabs" | "translate":
            return len(value) * widest()
        case "rfind" | "rindex" | "rsplit" | "rpartition":  # take as long as that
            return len(value) * widest() >> 7
        case "indent":
            return len(str(value).splitlines()) * widest()
        case "replace":
            return str(value).count(str(fields.get("old", *rest[:1]))) * widest()
        case "join":
            return len(value) * max(map(_count, rest), default=0)
        case "join_items":
            return _count(value) * widest()
        case "format" | "strftime_now":
            text = str(value)
            return _numbers(text) + (text.count("%(") + text.count("*")) * widest()
        case "sum" if any(isinstance(e, _LISTS) for e in (*rest, *fields.values())):
            return MOST_AT_ONCE + 1  # it would copy the sum of lists for each list
    return 0


def _count(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _numbers(text: str) -> int:
    """The sum of all numbers in a format."""
    return sum(map(int, re.findall(r"\d+", text)))


def _written(value: Any) -> str:
    """What stands between braces in a template, as text."""
    return value if isinstance(value, str) else str(_budget.get().made(str(value)))
