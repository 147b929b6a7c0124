"""Chat templates that loop for ever, or fill the memory, are stopped; all others write the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

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
}
DOUBLED = (
    "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
)
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
    "a list of itself, compared": (
        DOUBLED % ("[0]", "[n.x, n.x]") + "{% set a = n.x %}" + DOUBLED % ("[0]", "[n.x, n.x]")
    )
    + "{{ a == n.x }}",
    "a list of itself, tested": (
        DOUBLED % ("[0]", "[n.x, n.x]") + "{% set a = n.x %}" + DOUBLED % ("[0]", "[n.x, n.x]")
    )
    + "{{ a is eq(n.x) }}",
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
