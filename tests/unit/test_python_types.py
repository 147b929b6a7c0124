"""Ordinary Python types, as pydantic's schemas: whatever their grammar allows, pydantic takes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from benchmarks.quality.schema_types import TYPES
from gemserve.contract.sampling import Grammar
from gemserve.decoding.grammar import Grammars, Matcher
from gemserve.decoding.schema_preparation import prepare_schema
from tests.fakes import EOS

LIMIT = 200
NUM_WALKS = 6
CLOSING = ('"', "]", "}", "}}", '"}', "]}", '"]', '"}}')
# their schemas do not say all that pydantic demands: a scheme, or which texts are numbers
UNSAID = ("HttpUrl", "AnyUrl", "Json", "Decimal")


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=len(tokenizer), end_ids=(EOS,))


def walk(tokenizer: Any, matcher: Matcher, closing: set[int], rng: Random) -> str | None:
    """Allowed tokens at random, closing ones more often; None if no end is found."""
    ids: list[int] = []
    while len(ids) < LIMIT:
        choices = {*np.flatnonzero(matcher.allowed()).tolist()}
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.4):
            return str(tokenizer.decode(ids))
        pool = choices & closing if rng.random() < 0.5 else set()
        ids.append(rng.choice(sorted((pool or choices) - {EOS})))
        matcher.advance(ids[-1])
    return None


@pytest.mark.parametrize("name", TYPES)
def test_any_walk_through_a_type_s_schema_is_one(
    tokenizer: Any, grammars: Grammars, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of these were refused as parameters of a forced call."""
    monkeypatch.setattr("gemserve.decoding.grammar.check", lambda *_: None)  # another test's
    model = create_model("Answer", value=(TYPES[name], ...))
    schema = prepare_schema(model.model_json_schema(), is_strict=False)
    grammar = Grammar(json.dumps(schema), is_strict=False)
    closing = {tokenizer.convert_tokens_to_ids(text) for text in CLOSING}
    ended = 0
    for seed in range(NUM_WALKS):
        text = walk(tokenizer, grammars.matcher(grammar), closing, Random(seed))
        if text is None:
            continue
        ended += 1
        json.loads(text)
        if name not in UNSAID:
            model.model_validate_json(text)
    assert ended
