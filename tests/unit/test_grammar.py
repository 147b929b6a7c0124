"""Matchers: what they allow, that they share nothing, and that no schema can hold them up."""

from __future__ import annotations

import gc
import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from gemserve.contract.sampling import ANY_OBJECT, Grammar, SamplingParams
from gemserve.decoding.grammar import GrammarFailed, Grammars, Matcher
from gemserve.decoding.grammar_compiler import MAX_GRAMMAR_BYTES, InvalidGrammar
from gemserve.decoding.sampling import Draw, SamplerState, draw
from gemserve.decoding.schema_preparation import prepare_schema
from tests.fakes import EOS
from tests.schemas import REFUSED, Schema, random_schema

NUM_SCHEMAS = int(os.environ.get("GEMSERVE_TEST_SCHEMAS", "10"))
PADDED_VOCAB = 4200  # more than the tokenizer has, as checkpoints do
END = frozenset({EOS})


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=PADDED_VOCAB, end_ids=END)


def grammar(schema: Schema) -> Grammar:
    return Grammar(json.dumps(schema))


def allowed_ids(matcher: Matcher) -> list[int]:
    return np.flatnonzero(matcher.allowed()).tolist()


def write(tokenizer: Any, matcher: Matcher, text: str) -> bool:
    """Advance by the text's tokens; False if the grammar does not allow one of them."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.allowed()[token]:
            return False
        matcher.advance(token)
    return True


def random_walk(tokenizer: Any, matcher: Matcher, seed: int, limit: int) -> str | None:
    """Any allowed tokens until the end; None if it does not come."""
    rng, ids = Random(seed), []
    while len(ids) < limit:
        choices = allowed_ids(matcher)
        assert choices
        if EOS in choices:
            return str(tokenizer.decode(ids))
        ids.append(rng.choice(choices))
        matcher.advance(ids[-1])
    return None


def test_any_walk_through_a_bounded_schema_is_valid(tokenizer: Any, grammars: Grammars) -> None:
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed)
        text = random_walk(tokenizer, grammars.matcher(grammar(schema)), seed, 2000)
        assert text is not None, schema
        jsonschema.validate(json.loads(text), schema)


def test_a_complete_grammar_allows_only_the_end(tokenizer: Any, grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar({"enum": ["yes", "no"]}))
    assert not matcher.is_complete
    assert write(tokenizer, matcher, '"yes"')
    assert matcher.is_complete
    assert allowed_ids(matcher) == [EOS]


def test_an_open_end_allows_the_end_and_more(tokenizer: Any, grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar({"type": "integer"}))
    assert EOS not in allowed_ids(matcher)
    assert write(tokenizer, matcher, "27")
    assert EOS in allowed_ids(matcher)
    assert not matcher.is_complete
    matcher.advance(EOS)
    assert matcher.is_complete


def test_tokens_beyond_the_tokenizer_are_never_allowed(tokenizer: Any, grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar({"type": "string"}))
    assert write(tokenizer, matcher, '"')
    assert len(matcher.allowed()) >= PADDED_VOCAB
    assert not matcher.allowed()[len(tokenizer) :].any()
    assert not {*tokenizer.all_special_ids} & {*allowed_ids(matcher)}


def test_matchers_of_one_grammar_share_nothing(tokenizer: Any, grammars: Grammars) -> None:
    same = grammar({"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3})
    alone = grammars.matcher(same)
    assert write(tokenizer, alone, "[22")
    expected = allowed_ids(alone)
    first, second = grammars.matcher(same), grammars.matcher(same)
    assert write(tokenizer, first, "[")
    assert write(tokenizer, second, "[1, 1, 1]")
    with pytest.raises(GrammarFailed):
        second.advance(5)
    assert write(tokenizer, first, "22")
    assert allowed_ids(first) == expected


@pytest.mark.parametrize("text", ['{"a":1,"b":[]}', '{"a": 1, "b": []}'])
def test_both_usual_spacings(tokenizer: Any, grammars: Grammars, text: str) -> None:
    assert write(tokenizer, grammars.matcher(ANY_OBJECT), text)


@pytest.mark.parametrize("text", ['{"a":  1}', "{ ", "{\n", '{"a" ', " {", "[", "1"])
def test_no_other_space_and_no_other_value(tokenizer: Any, grammars: Grammars, text: str) -> None:
    assert not write(tokenizer, grammars.matcher(ANY_OBJECT), text)


def test_properties_come_in_the_schema_s_order(tokenizer: Any, grammars: Grammars) -> None:
    schema = {"properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    ordered = grammar({"type": "object", **schema})
    assert write(tokenizer, grammars.matcher(ordered), '{"b": 1, "a": 2')
    assert not write(tokenizer, grammars.matcher(ordered), '{"a"')


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_to_is_refused_soon(grammars: Grammars, name: str) -> None:
    schema, word = REFUSED[name]
    started = time.process_time()
    with pytest.raises(InvalidGrammar, match=word) as caught:
        grammars.matcher(grammar(schema))
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 2  # this process's own; the trial has its limit


def test_a_schema_s_size_is_limited(grammars: Grammars) -> None:
    big = {"enum": ["x" * MAX_GRAMMAR_BYTES]}
    with pytest.raises(InvalidGrammar, match=str(MAX_GRAMMAR_BYTES)):
        grammars.matcher(grammar(big))


def test_a_schema_that_is_too_large_is_not_remembered(tokenizer: Any) -> None:
    """320 of ten megabytes each stayed in memory."""
    grammars = Grammars(tokenizer, vocab_size=PADDED_VOCAB, end_ids=END)
    given = Grammar("x" * 10**7)
    for use in (grammars.known, grammars.try_out, grammars.matcher):
        with pytest.raises(InvalidGrammar, match=str(MAX_GRAMMAR_BYTES)):
            use(given)
    assert not grammars._known


def test_many_properties_are_no_error_after_the_first_brace(
    tokenizer: Any, grammars: Grammars
) -> None:
    """With the library's own limit of items a row, they failed at the second token."""
    names = {f"p{i}": {"type": "integer"} for i in range(1000)}
    matcher = grammars.matcher(grammar({"type": "object", "properties": names}))
    assert write(tokenizer, matcher, '{"p7": 3, "p9": 4}')


CALLS = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"const": "find"},
            "arguments": {"type": "object", "maxProperties": 0},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
)
CALL = '{"name": "find", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (f"<tool_call>\n{CALL}\n</tool_call>", True),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", None),
        ('{"a": 1}', True),
        ('{"a": 1, "b": 2}', False),
        ('{"name": "other"', False),
        ('{"name": "find", "arguments": {"x"', False),
        ("I find", False),
        (f"{CALL} {CALL}", False),
    ],
)
def test_an_answer_is_a_call_or_fits_the_format(
    tokenizer: Any, grammars: Grammars, text: str, fits: bool | None
) -> None:
    """None: only where several calls are allowed."""
    answer = json.dumps({"properties": {"a": {}}, "type": "object", "additionalProperties": False})
    for is_parallel in (False, True):
        both = Grammar(answer, calls=CALLS, is_parallel=is_parallel)
        matcher = grammars.matcher(both)
        assert write(tokenizer, matcher, text) == (is_parallel if fits is None else fits)
        if fits:
            assert EOS in allowed_ids(matcher)


def test_what_cannot_be_held_is_left_out_if_the_schema_is_not_strict(
    tokenizer: Any, grammars: Grammars
) -> None:
    for name in ("unique", "property names", "not", "if"):
        schema = json.dumps(REFUSED[name][0])
        for given in (Grammar(schema, False), Grammar('{"type": "null"}', False, calls=schema)):
            assert grammars.matcher(given).allowed().any()


def test_patterns_that_cannot_be_held_are_no_error_if_the_schema_is_not_strict(
    tokenizer: Any, grammars: Grammars
) -> None:
    for pattern in (r"^\bfoo\b$", r"[\b]", r"[[]x", r"\cA\0", r"\<a\>", "(?!a)b"):
        values = {"pattern": pattern, "type": "string"}
        schema = {"type": "object", "patternProperties": {pattern: values}}
        text = json.dumps(prepare_schema(schema, is_strict=False))
        matcher = grammars.matcher(Grammar(text, is_strict=False))
        assert write(tokenizer, matcher, '{"foo": "a"}')
        assert not write(tokenizer, grammars.matcher(Grammar(text, is_strict=False)), '{"foo": 1')


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(
        "gemserve.decoding.grammar.check", lambda grammar, _: checked.append(grammar.text)
    )
    for _ in range(3):
        grammars.matcher(grammar({"const": "once"}))
    assert len(checked) == 1


def test_the_tokenizer_is_written_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial wrote megabytes of it as JSON, and all other threads stood still meanwhile."""
    grammars.matcher(grammar({"const": "first"}))
    written: list[str] = []
    dumps = json.dumps

    def recording(*given: Any, **options: Any) -> str:
        written.append(dumps(*given, **options))
        return written[-1]

    monkeypatch.setattr(json, "dumps", recording)
    grammars.matcher(Grammar('{"const": "second"}'))
    assert 0 < len("".join(written)) < 1000


def test_29_february_is_a_date_in_leap_years(tokenizer: Any, grammars: Grammars) -> None:
    schema = grammar(prepare_schema({"type": "string", "format": "date"}, is_strict=True))
    for text, fits in (("2024-02-29", True), ("2023-02-29", False), ("2000-02-29", True)):
        assert write(tokenizer, grammars.matcher(schema), f'"{text}"') == fits


def test_a_refusal_is_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(grammar: Grammar, _: object) -> None:
        tried.append(grammar.text)
        raise InvalidGrammar("takes too long to compile")

    monkeypatch.setattr("gemserve.decoding.grammar.check", refuse)
    for _ in range(3):
        with pytest.raises(InvalidGrammar, match="too long"):
            grammars.matcher(grammar({"const": "never"}))
    assert len(tried) == 1


def test_a_refusal_holds_no_request(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that was raised again kept the frames it had gone through, and what they had."""

    def refuse(*_: object) -> None:
        raise InvalidGrammar("takes too long to compile")

    monkeypatch.setattr("gemserve.decoding.grammar.check", refuse)
    given = grammar({"const": "refused"})

    def ask(use: Callable[[Grammar], object]) -> weakref.ref[set[str]]:
        body = {"a request's body"}
        with suppress(InvalidGrammar):
            use(given)
        return weakref.ref(body)

    bodies = [ask(use) for use in (grammars.try_out, grammars.known, grammars.matcher)]
    gc.collect()
    assert [body() for body in bodies] == [None] * 3


def test_a_tokenizer_that_cannot_be_read_is_no_crash() -> None:
    class Backend:
        def to_str(self) -> str:
            return "{}"

    class Tokenizer:
        backend_tokenizer = Backend()

        def __len__(self) -> int:
            return 8

    with pytest.raises(InvalidGrammar, match="tokenizer"):
        Grammars(Tokenizer(), vocab_size=8, end_ids=END).matcher(ANY_OBJECT)


# Sampling


def sampler(matcher: Any, **changes: Any) -> SamplerState:
    return SamplerState(SamplingParams(max_tokens=64, seed=0, **changes), (), END, matcher)


def drawn_text(tokenizer: Any, state: SamplerState, logits: torch.Tensor, limit: int) -> str:
    ids: list[int] = []
    for _ in range(limit):
        (result,) = draw(logits[None], [state])
        assert isinstance(result, Draw), result
        if result.token == EOS:
            break
        ids.append(result.token)
    return str(tokenizer.decode(ids))


def test_a_bias_towards_what_is_not_allowed_is_outvoted(tokenizer: Any, grammars: Grammars) -> None:
    logits = torch.zeros(PADDED_VOCAB)
    good = tokenizer.encode("yes", add_special_tokens=False)[0]
    for temperature in (0.0, 1.0):
        state = sampler(
            grammars.matcher(grammar({"enum": ["yes"]})),
            temperature=temperature,
            logit_bias=(
                (tokenizer.encode("no", add_special_tokens=False)[0], 100.0),
                (good, -100.0),
            ),
            repetition_penalty=2.0,
        )
        assert drawn_text(tokenizer, state, logits, 20) == '"yes"'


def test_min_tokens_give_way_where_only_the_end_is_allowed(
    tokenizer: Any, grammars: Grammars
) -> None:
    """Or no token at all would be left, and the request would fail."""
    state = sampler(grammars.matcher(grammar({"const": 7})), min_tokens=30)
    assert drawn_text(tokenizer, state, torch.zeros(PADDED_VOCAB), 40) == "7"


def test_min_tokens_hold_where_the_grammar_goes_on(tokenizer: Any, grammars: Grammars) -> None:
    state = sampler(grammars.matcher(grammar({"type": "integer"})), min_tokens=30)
    logits = torch.zeros(PADDED_VOCAB)
    logits[EOS] = 50
    assert len(drawn_text(tokenizer, state, logits, 40)) >= 30


def test_a_matcher_that_fails_takes_no_other_request_with_it(grammars: Grammars) -> None:
    class Broken:
        def __init__(self, method: str) -> None:
            self.method = method

        def allowed(self) -> Any:
            if self.method == "allowed":
                raise GrammarFailed("limit")
            return np.ones(PADDED_VOCAB, dtype=np.bool_)

        def advance(self, token: int) -> None:
            raise MemoryError("limit")

    logits = torch.randn(4, PADDED_VOCAB, generator=torch.Generator().manual_seed(0))
    good = grammars.matcher(grammar({"type": "boolean"}))
    states = [sampler(m) for m in (Broken("allowed"), None, Broken("advance"), good)]
    first, free, second, held = draw(logits, states)
    assert isinstance(first, GrammarFailed)
    assert isinstance(second, MemoryError)
    assert isinstance(held, Draw)
    alone = draw(logits[1:2], [sampler(None)])
    assert free == alone[0]


def test_rules_that_fit_a_text_in_many_ways_end_their_own_answer(grammars: Grammars) -> None:
    """A token took a second after 70 tokens, and ever more later, in the thread of all answers.

    The trial draws too few tokens to see it.
    """
    sums = " | ".join(" ".join(["a"] * count) for count in range(2, 12))
    rules = f'start: ("x" | "y"){{60}} a\na: {sums} | /[a-z ]/ | /[a-z]+/'
    matcher = grammars.matcher(Grammar(rules, kind="context_free"))
    started_s, rng = time.monotonic(), Random(0)

    def write_on() -> None:
        for _ in range(400):
            matcher.advance(rng.choice([i for i in allowed_ids(matcher) if i != EOS]))

    with pytest.raises(GrammarFailed, match="items"):
        write_on()
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("bounds", [{}, {"minimum": 1}, {"maximum": 10}])
def test_an_integer_has_an_end(grammars: Grammars, tokenizer: Any, bounds: dict[str, int]) -> None:
    """A weak model writes digits as long as it may."""
    schema = prepare_schema({"type": "integer", **bounds}, is_strict=True)
    sign = "-" if "maximum" in bounds else ""
    matcher = grammars.matcher(grammar(schema))
    num_digits = 0
    for token in tokenizer.encode(sign + "7" * 40, add_special_tokens=False):
        if not matcher.allowed()[token]:
            break
        matcher.advance(token)
        num_digits += len(tokenizer.decode([token]).strip("-"))
    assert num_digits == 19


def test_integers_of_64_bits_can_be_written(grammars: Grammars, tokenizer: Any) -> None:
    schema = prepare_schema({"type": "integer"}, is_strict=True)
    for text in ("1795417774440123456", "-1", "0", "9000000000000000000"):
        matcher = grammars.matcher(grammar(schema))
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert matcher.allowed()[token]
            matcher.advance(token)
