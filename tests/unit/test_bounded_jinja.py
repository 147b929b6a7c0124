"""Chat templates that loop for ever, or fill the memory, are stopped; all others write the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from gemserve import bounded_jinja
from gemserve.bounded_jinja import TemplateLimit, render
from gemserve.prompting.chat_template import render_chat
from tests.chat_templates import FAMILIES, FOLDER

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who keeps the <lantern>?\n"},
    {"role": "assistant", "content": "Ada.", "reasoning": "A name is asked for."},
    {"role": "user", "content": " Where? "},
]
LOOPS: Mapping[str, str] = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "a recursive loop": (
        "{% for a in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}"
    ),
    "filters over filters": (
        "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}"
    ),
    "sorting": "{% for a in range(99999) %}{{ range(99999) | sort | length }}{% endfor %}",
    "a call in a loop": "{% for a in range(99999) %}{{ ('x' * 99999).upper() }}{% endfor %}",
    "a condition of a loop": "{% for a in range(99999) if range(99999) | sum < 0 %}{% endfor %}",
    "long paths": "{{ range(99999) | map(attribute='real' ~ '.real' * 9999) | list | length }}",
    "lists in a macro": (
        "{% set b = [1] * 99999 %}{% macro f() %}{% for i in range(9999) %}{{ b }}{% endfor %}"
        "{% endmacro %}{{ f() | length }}"
    ),
}
DOUBLED = (
    "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
)
_LIST = DOUBLED % ("[0]", "[n.x, n.x]")
TWICE = _LIST + "{% set a = n.x %}" + _LIST
LARGE: Mapping[str, str] = {
    "a text many times": "{{ 'x' * 10**9 }}",
    "a number of times a text": "{{ 10**9 * 'x' }}",
    "a list many times": "{{ ([0] * 10**9) | length }}",
    "times a variable": "{{ '=' * width }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "products": DOUBLED % ("9", "n.x * n.x"),
    "a tilde": DOUBLED % ("'x'", "n.x ~ n.x") + "{{ n.x }}",
    "a sum": DOUBLED % ("'x'", "n.x + n.x"),
    "a sum of lists": DOUBLED % ("[0]", "n.x + n.x"),
    "a block": (
        "{% macro f(n) %}{% for i in range(9999) %}{{ n }}{% endfor %}{% endmacro %}"
        "{{ f(f(f('x'))) }}"
    ),
    "output": "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "parts": (
        "{% set x = 'x' * 9999999 %}{% set n = namespace(x=[]) %}"
        "{% for i in range(99999) %}{% set n.x = n.x + [x[i:]] %}{% endfor %}"
    ),
    "a list of itself, written": DOUBLED % ("[0]", "[n.x, n.x]") + "{{ n.x }}",
    "a list of itself, as JSON": DOUBLED % ("[0]", "[n.x, n.x]") + "{{ n.x | tojson }}",
    "a list of itself, compared": TWICE + "{{ a == n.x }}",
    "a list of itself, tested": TWICE + "{{ a is eq(n.x) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "a constant": "{{ 'x' | center(1000000000) }}",
    "mapped": "{{ ['x'] | map('center', 10**9) | list }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "indent": "{{ ('x\\n' * 99999) | indent(99999) }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "the method replace": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "join": "{{ range(99999) | join('y' * 99999) }}",
    "the method join": "{{ ('y' * 99999).join('x' * 99999) }}",
    "join what comes one by one": "{{ ('y' * 99999).join(range(99999) | map('string')) }}",
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "a percent sign": "{{ '%*d' % (10**9, 1) }}",
    "the method format": "{{ '{:1000000000}'.format(1) }}",
    "a nested format": "{{ '{:{}}'.format(1, 10**9) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') | length }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "adding up lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "a date": "{{ strftime_now('%1000000000Y') }}",
    "lists of themselves, sorted": TWICE + "{{ [a, n.x] | sort | length }}",
    "lists of themselves, counted": TWICE + "{{ [a].count(n.x) }}",
    "a tuple of itself, as a key": DOUBLED % ("(0,)", "(n.x, n.x)") + "{{ {n.x: 1} | length }}",
    "arguments of a macro": (
        "{% set n = namespace(x=0) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(n.x, n.x) }}{% endfor %}{{ n.x }}"
    ),
    "batches filled with themselves": (
        "{% set n = namespace(x=0) %}{% for i in range(60) %}"
        "{% for r in [0] | batch(3, n.x) %}{% set n.x = r %}{% endfor %}{% endfor %}{{ n.x }}"
    ),
    "defaults": DOUBLED % ("0", "['', ''] | map('default', n.x, true) | list") + "{{ n.x }}",
    "lists in lists, indented": (
        "{% set n = namespace(x=[0] * 99999) %}{% for i in range(800) %}{% set n.x = [n.x] %}"
        "{% endfor %}{{ n.x | tojson(indent=9) }}"
    ),
    "separators of JSON": "{{ ([0] * 99999) | tojson(separators=['y' * 99999, ':']) }}",
    "replace by names": "{{ ('x' * 99999) | replace(new='y' * 99999, old='x') }}",
    "replace by a list": "{{ ('x' * 99999) | replace('x', [[0] * 99999]) }}",
    "join by a list": "{{ ('x' * 99999) | join([[0] * 99999]) }}",
    "join attributes": (
        "{% set n = namespace(x='x' * 999999) %}{{ ([n] * 9999) | join(attribute='x') }}"
    ),
    "join defaults": "{{ ([''] * 9999) | map('default', 'x' * 999999, true) | join }}",
    "indent lines of old": "{{ ('x\\r' * 99999) | indent(99999) }}",
    "a table of translations": "{{ ('x' * 99999).translate(''.maketrans({'x': 'y' * 99999})) }}",
    "a field again and again": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "a key again and again": "{{ ('%(a)s' * 99999) % {'a': [0] * 99999} }}",
    "a key with a width": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "a width in a text": "{{ '{:{}}'.format(1, '1000000000') }}",
    "lists of long numbers": "{{ ([10 ** 4000] * 999999) | string }}",
    "long numbers": "{{ ('f' * 9999999) | int(base=16) // 3 }}",
    "digits": "{{ 1 | round(10**8, 'ceil') }}",
    "searches from the right": "{{ ('a' * 9999999).rfind('ab' ~ 'a' * 4999999) }}",
}


def check() -> None:
    pass


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_takes_too_long_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_jinja, "MOST_S", 0.2)
    began_s = time.thread_time()
    with pytest.raises(TemplateLimit, match=r"0\.2 s|characters"):
        render(LOOPS[name], {}, check)
    assert time.thread_time() - began_s < 2


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_makes_too_much_is_stopped(name: str) -> None:
    began_s = time.thread_time()
    with pytest.raises(TemplateLimit, match=r"characters|items|bits|lists"):
        render(LARGE[name], {"width": 10**12}, check)
    assert time.thread_time() - began_s < 4


def test_no_chat_needs_a_thousand_paragraphs_of_latin() -> None:
    with pytest.raises(Exception, match="lipsum"):
        render("{{ lipsum(n=10**9) }}", {}, check)


@pytest.mark.parametrize("name", ["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
def test_no_chat_needs_filters_for_pages_whose_time_has_no_bound(name: str) -> None:
    with pytest.raises(TemplateError, match=name):
        render("{{ 'x' | " + name + " }}", {}, check)


def test_a_text_is_encoded_by_no_codec() -> None:
    """One of them took 6 minutes for 40,000 characters."""
    with pytest.raises(SecurityError, match="encode"):
        render("{{ 'x'.encode('punycode') }}", {}, check)


def test_namespaces_within_namespaces_are_not_written() -> None:
    source = (
        "{% set n = namespace(x='in') %}{% for i in range(60) %}"
        "{% set m = namespace(a=n.x, b=n.x) %}{% set n.x = m %}{% endfor %}{{ n.x }}"
    )
    assert len(render(source, {}, check)) < 200


def test_macros_without_an_end_are_refused() -> None:
    with pytest.raises(RecursionError):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}, check)


def test_work_that_nobody_waits_for_is_stopped() -> None:
    def left() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        render(LOOPS["nested loops"], {}, left)


def _theirs(tokenizer: Any, messages: Any, **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:
        return f"refused: {error}"


def _ours(tokenizer: Any, messages: Any, **options: Any) -> str:
    try:
        return render_chat(tokenizer, messages, **options)
    except Exception as error:
        return str(error).replace("messages: the model's chat template refuses them", "refused")


FEATURES = """{%- set n = namespace(seen=0, text='') -%}
{%- for m in messages if m.role != 'tool' -%}
{%- if loop.index > 7 %}{% break %}{% endif -%}
{%- set n.seen = n.seen + 1 -%}
{{- loop.index ~ '/' ~ loop.length ~ ' ' ~ m['role'] | upper }}: {{ m.content.strip() | indent(2) }}
{%- generation %}{{ m.get('reasoning_content', '-') }}{{ m.thinking }}{% endgeneration %}
{% else %}none{% endfor -%}
{{ messages | map(attribute='role') | join(', ') }} {{ messages[1:] | length }}
{{ messages[::-1][0].role }}
{{ messages | tojson(indent=2) }} {{ '%05.1f' % 3.14159 }} {{ '{:>8}|{a}'.format('x', a=1) }}
{{ (1, 2) ~ [3] ~ none ~ undefined_name }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 3 * 'ab' }}{{ [1] * 2 + [2] }}
{{ dict(a=1).a }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ 'a' in 'abc' }} {{ 1 < 2 <= 2 }} {{ messages[0] == messages[1] }}
{{ x is defined }} {{ bos_token }}
{% macro twice(t) %}{{ t }}{{ caller() }}{{ t }}{% endmacro %}{% call twice('>') %}in{% endcall %}
{% for k, v in {'a': 1, 'b': [1, 2]}.items() recursive %}{{ k }}{{ v }}{% endfor %}
{% filter upper %}shout{% endfilter %}{% set block %}kept{% endset %}{{ block | length }}
{{ messages | groupby('role') | length }} {{ [3, 1, 2] | sort | first }} {{ 'x' | center(5) }}|
{% if add_generation_prompt %}{{ tools | tojson if tools else '' }}{% endif %}"""


@pytest.mark.parametrize("name", [*FAMILIES, "features"])
def test_templates_write_what_they_write_in_transformers(tokenizer: Any, name: str) -> None:
    """Every template of the suite, with orders of messages that some refuse."""
    source = FEATURES if name == "features" else (FOLDER / f"{name}.jinja").read_text()
    own, tokenizer.chat_template = tokenizer.chat_template, source
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    try:
        for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[:1], MESSAGES[::-1]):
            for has_prompt in (True, False):
                options: dict[str, Any] = {"add_generation_prompt": has_prompt}
                for tools in ((), (tool,)):
                    expected = _theirs(tokenizer, messages, tools=list(tools) or None, **options)
                    assert _ours(tokenizer, messages, tools=tools, **options) == expected
    finally:
        tokenizer.chat_template = own
