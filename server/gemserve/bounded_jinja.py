"""Chat templates in a sandbox with bounds: on time, on what is made, and on what is written.

Templates come with models, and what they loop over comes from clients. Jinja's sandbox keeps a
template from the machine, but not from looping for hours or from filling the memory. Here every
iteration, call, filter and test looks at the clock, and whatever makes a text or a list is counted
before it is made. Templates see the names and filters that transformers gives to them, without
`lipsum`, which no chat needs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

MOST_S = 5.0  # of processor time of one rendering
MOST_CHARACTERS = 1 << 28  # of all texts that one rendering makes, and those of the longest one:
MOST_AT_ONCE = 1 << 25
MOST_NODES = 1 << 20  # of what is written, compared or filtered, lists within lists counted each
_ITEM_CHARACTERS = 8  # what an item of a list counts
_MOST_BITS = 1 << 14  # of an integer
_CHECK_EVERY = 64
_WRITES = frozenset({"string", "tojson", "pprint", "join", "format", "replace", "xmlattr"})
_Values = tuple[Any, ...]


class TemplateLimit(Exception):
    """A rendering has reached a limit, which the message names."""


class _Budget:
    """What one rendering has used."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._ends_s = time.thread_time() + MOST_S
        self._count, self._characters = 0, 0

    def step(self) -> None:
        """Count an iteration or a call."""
        self._count += 1
        if self._count % _CHECK_EVERY == 0:
            self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        self._check()
        if time.thread_time() > self._ends_s:
            raise TemplateLimit(f"it takes longer than {MOST_S:g} s of processor time")

    def make(self, characters: int) -> None:
        """Count what is about to be made."""
        if characters > MOST_AT_ONCE:
            raise TemplateLimit(f"it makes a text of more than {MOST_AT_ONCE:,} characters")
        self._characters += max(0, characters)
        if self._characters > MOST_CHARACTERS:
            raise TemplateLimit(f"it makes texts of more than {MOST_CHARACTERS:,} characters")
        if characters > MOST_AT_ONCE >> 8:
            self.look_at_the_clock()


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
    return _ENVIRONMENT.from_string(source)


class _Generation(Extension):
    """`{% generation %}`: what an assistant has written. It is written as if without the tag."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without what else a class has."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    def __init__(*args: Any, **fields: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


class _Formatter(SandboxedFormatter):
    """`str.format`, whose widths are bounded."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _make(_widths(format_spec))
        return super().format_field(value, format_spec)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts what templates do. `_Rewriter` makes them call `filters` that begin with `bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        # constants are not computed when a template is compiled, where nothing is counted
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=extensions,
            finalize=_written,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _bounded(name, each, True) for name, each in tests.items()}
        for function in (bounded_loop, bounded_text, bounded_value, bounded_part):
            self.filters[function.__name__] = function
        self.globals |= {"dict": _Dict(), "namespace": _Namespace, "strftime_now": _now}
        self.globals["raise_exception"] = _raise
        del self.globals["lipsum"]

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what was written."""
        budget, taken, length = _budget.get(), list[str](), 0
        for part in parts:
            taken.append(part)
            length += len(part)
            if length > MOST_AT_ONCE:
                break
        budget.make(length)
        return "".join(taken)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _rewrite(template)
        return template

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **fields: Any,
    ) -> Any:
        _budget.get().step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, (str, bytes, int)):
            if name == "join" and args:
                args = (_as_list(args[0]), *args[1:])
            _make(_growth(name, (owner, *args, *fields.values())))
        return _noted(super().call(__context, __obj, *args, **fields))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def bounded(*args: Any, **fields: Any) -> str:
            for each in (*args, *fields.values()):
                _check_nodes(each)
            named = args[0] if is_map else fields
            return str(_Formatter(self).vformat(text, () if is_map else args, named))

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.get().step()
        if operator == "+":
            if isinstance(left, Sized) and isinstance(right, Sized):
                _make(_size(left) + _size(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, (str, bytes)):
            _make(_growth("format", (left, right)))
            _check_nodes(right)
        return super().call_binop(context, operator, left, right)


def _rewrite(template: nodes.Template) -> None:
    """Let the template count what Jinja's sandbox leaves to Python."""
    for loop in list(template.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "bounded_loop")
    for compared in list(template.find_all(nodes.Compare)):
        compared.expr = _filtered(compared.expr, "bounded_value")
        for operand in compared.ops:
            operand.expr = _filtered(operand.expr, "bounded_value")
    _replace_in(template)


def _replace_in(node: nodes.Node) -> None:
    """Replace what joins texts, and parts of texts and lists, below a node."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            setattr(node, name, [_replaced(e) if isinstance(e, nodes.Node) else e for e in value])


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_in(node)
    if isinstance(node, nodes.Concat):
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, "bounded_text")
    if not isinstance(node, nodes.Getitem):
        return node
    return _filtered(node, "bounded_part") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: Any, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def bounded_loop(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop."""
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def bounded_text(parts: list[Any]) -> str:
    """The parts of `a ~ b` as one text."""
    return _Environment.concat([str(_written(part)) for part in parts])


def bounded_value(value: Any) -> Any:
    """What is compared."""
    _check_nodes(value)
    return value


def bounded_part(value: Any) -> Any:
    """A part of a text or of a list."""
    return _noted(value)


def _bounded(name: str, function: Callable[..., Any], is_test: bool = False) -> Callable[..., Any]:
    """A filter or a test that is counted."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or the environment

    @wraps(function)  # with the attribute that says what Jinja passes first
    def counted(*args: Any, **fields: Any) -> Any:
        _budget.get().step()
        if name == "join" and len(args) > skipped:
            args = (*args[:skipped], _as_list(args[skipped]), *args[skipped + 1 :])
        values = (*args[skipped:], *fields.values())
        _make(_growth(name, values))
        if is_test or name in _WRITES:
            for value in values:
                _check_nodes(value)
        return _noted(function(*args, **fields))

    return counted


def _growth(name: str, values: _Values) -> int:
    """At most how many characters a filter or a method makes that can make many of few."""
    value, *rest = values or ("",)
    widths = [each for each in rest if isinstance(each, int)]
    texts = [len(each) for each in rest if isinstance(each, (str, bytes))]
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return max(widths, default=0)
    if name in ("batch", "slice"):
        return max(widths, default=0) * _ITEM_CHARACTERS
    if name in ("expandtabs", "indent", "wordwrap"):
        lines = len(re.findall(r"[\t\n]", str(value))) + 1
        lines = max(lines, len(value)) if name == "wordwrap" else lines
        width = 0 if name == "wordwrap" else max(widths, default=0)
        return lines * max([width, *texts])
    if name == "replace" and len(rest) > 1:
        return _replaced_characters(str(value), str(rest[0]), str(rest[1]))
    if name == "join":
        return _joined_characters(value, rest)
    if name == "translate" and rest and isinstance(rest[0], Mapping):
        longest = max((len(e) for e in rest[0].values() if isinstance(e, str)), default=1)
        return len(value) * longest
    if name == "tojson":
        return max(widths, default=0) * MOST_NODES if max(widths, default=0) > 64 else 0
    if name == "sum" and any(isinstance(each, Sized) for each in rest):
        raise TemplateLimit("it adds up lists by `sum`")
    if name == "format":
        return _widths(value) + sum(_ints(rest)) if "*" in str(value) else _widths(value)
    return 0


def _replaced_characters(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def _joined_characters(value: Any, rest: list[Any]) -> int:
    """Of `"-".join(items)` and `items | join("-")`."""
    is_method = isinstance(value, (str, bytes)) and bool(rest) and isinstance(rest[0], list)
    between, items = (value, rest[0]) if is_method else ((rest or [""])[0], value)
    if not isinstance(items, (str, bytes, list, tuple, dict, range)):
        return 0
    written = 0 if isinstance(items, (str, bytes, range)) else sum(map(_length, items))
    return len(items) * len(str(between)) + written


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _as_list(items: Any) -> Any:
    """The items, if they come one by one."""
    return list(bounded_loop(items)) if isinstance(items, Iterator) else items


def _widths(text: Any) -> int:
    """The sum of all numbers in a format."""
    found = re.findall(r"\d+", str(text))
    return MOST_AT_ONCE + 1 if any(len(n) > 9 for n in found) else sum(map(int, found))


def _ints(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield abs(value)
        elif isinstance(value, tuple):
            yield from _ints(value)


def _check_product(left: Any, right: Any) -> None:
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, bytes, list, tuple)) and isinstance(count, int):
            _make(_size(items) * max(0, count))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))


def _check_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise TemplateLimit(f"it makes an integer of more than {_MOST_BITS:,} bits")


def _make(characters: int) -> None:
    _budget.get().make(characters)


def _noted(made: Any) -> Any:
    """What a filter, a call or a slice has made, which is counted."""
    if isinstance(made, (str, bytes, list, tuple, dict)):
        _make(_size(made))
    return made


def _size(value: Sized) -> int:
    return len(value) * (1 if isinstance(value, (str, bytes)) else _ITEM_CHARACTERS)


def _written(value: Any) -> Any:
    """What stands between braces in a template, and is about to become text."""
    if not isinstance(value, str):
        _check_nodes(value)
    return value


def _check_nodes(value: Any) -> None:
    """Refuse lists that hold themselves so often that nobody can write or compare them."""
    if not isinstance(value, (list, tuple, dict)):
        return
    left, count, characters = [value], 0, 0
    while left:
        some = left.pop()
        items = [*some.keys(), *some.values()] if isinstance(some, dict) else some
        count += len(items)
        if count > MOST_NODES:
            raise TemplateLimit(f"it makes a list of more than {MOST_NODES:,} items in all")
        characters += sum(len(item) for item in items if isinstance(item, str))
        left += [item for item in items if isinstance(item, (list, tuple, dict))]
    _make(characters)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON, as transformers lets templates write it: nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    _make(_widths(form))
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise TemplateError(message)


_ENVIRONMENT = _Environment()
