"""The parts of a prompt that a library has read keep the tokens that they had when read alone."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.prompting.encoding import encode, token_edges
from gemserve.prompting.excerpt_tokens import encode_alone, find_places, with_parts

PARTS = ("of the river and the sea.", " The ferry", "leaves at nine", "Malmo", "é\n\n")


@pytest.mark.parametrize("between", ["", "\n\n", " ", "x"])
def test_tokens_of_parts_do_not_depend_on_what_is_beside_them(tokenizer: Any, between: str) -> None:
    before, after = "Tell me some", "thing about it?"
    text, places = before, []
    for part in PARTS:
        places.append((len(text), len(text) + len(part)))
        text += part + between
    text += after
    encoding = encode(tokenizer, text, add_special_tokens=True)
    joined, tokens = with_parts(tokenizer, text, encoding, tuple(places))
    starts, ends = token_edges(joined)
    for part, (low, high), (start, stop) in zip(PARTS, places, tokens, strict=True):
        assert joined.ids[start:stop] == encode_alone(tokenizer, part).ids
        assert starts[start] == low
        assert ends[stop - 1] == high
    special = [i for i in (tokenizer.bos_token_id,) if encoding.ids[0] == i]
    assert joined.ids[: len(special)] == special
    assert tokenizer.decode(joined.ids[len(special) :]) == text
    assert (starts[1:] >= starts[:-1]).all()


def test_a_prompt_without_parts_stays_as_it_is(tokenizer: Any) -> None:
    text = "The river runs past the houses."
    encoding = encode(tokenizer, text, add_special_tokens=True)
    joined, tokens = with_parts(tokenizer, text, encoding, ())
    assert joined.ids == encoding.ids
    assert tokens == ()


def test_places_are_found_where_a_template_cuts_blanks() -> None:
    excerpts = "  One.\n\nTwo.\n\n"
    places = ((0, 8), (8, 14))
    assert find_places(f"<user>{excerpts.strip()}<end>", excerpts, places) == ((6, 12), (12, 16))
    found = find_places(f"<user>a{excerpts}b<end>", excerpts, places)
    assert found[1][0] == 7 + 8
    assert find_places("nothing", excerpts, places) == ()
    assert find_places("nothing", "", ()) == ()


def test_blanks_at_the_ends_belong_to_their_parts() -> None:
    """Without them the first and the last segment had other tokens than in the document cache."""
    excerpts = "  One.\n\nTwo.\n\n"
    found = find_places(f"<docs>{excerpts}</docs>", excerpts, ((0, 8), (8, 14)))
    assert found == ((6, 14), (14, 20))


def test_the_last_place_counts() -> None:
    """An earlier turn may quote what is in front of the last one."""
    assert find_places("One. said One. again", "One.", ((0, 4),)) == ((10, 14),)
