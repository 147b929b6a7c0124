"""Passages: what a filter keeps or drops as a whole."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from gemserve.contract.prompt_parts import TextBreaks
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.passages import SHORTEST, number_passages, rank_passages
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.word_ranks import RankedPassages
from gemserve.prompting.prompt import chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.text_breaks import find_breaks, text_of_ids


def cut(text: str) -> list[list[str]]:
    """The text between paragraphs, sentences and lines, one token a character."""
    found = find_breaks([(0, text)], range(len(text)))
    parts = []
    for starts in (found.paragraphs, found.sentences, found.lines):
        edges = [0, *(s for s in starts if s), len(text)]
        parts.append([text[a:b] for a, b in pairwise(edges)])
    return parts


def test_paragraphs_sentences_and_lines_are_found() -> None:
    text = "One. Two is 3.14 e.g. this.\nThree\r\n \r\n\n- Four!\n  5) Five"
    paragraphs, sentences, lines = cut(text)
    assert paragraphs == ["One. Two is 3.14 e.g. this.\nThree\r\n \r\n\n", "- Four!\n  5) Five"]
    assert sentences == [
        "One.",
        " Two is 3.14 e.g. this.",
        "\nThree\r\n \r\n\n",
        "- Four!",
        "\n",
        "  5) Five",
    ]
    assert len(lines) == text.count("\n") + 1
    assert cut("甲。乙！丙")[1] == ["甲。", "乙！", "丙"]


def test_a_space_belongs_to_the_sentence_behind_it() -> None:
    """A token with a leading space was counted to the sentence before it."""
    tokens = ["One", ".", " Two", ".\n\n", " Three", "."]
    starts = [len("".join(tokens[:i])) for i in range(len(tokens))]
    found = find_breaks([(0, "".join(tokens))], starts)
    assert found.paragraphs == (0, 4)
    assert 2 in found.sentences


def test_each_message_begins_a_paragraph(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Who?"}]
    prompt = chat_prompt(tokenizer, messages)
    begun = [tokenizer.decode(prompt.ids[p : p + 1]) for p in prompt.breaks.paragraphs]
    assert any(token.startswith("H") for token in begun)
    assert any(token.startswith("W") for token in begun)


def test_token_ids_have_the_breaks_of_their_text(tokenizer: Any) -> None:
    text = "One is here. Two is there.\n\nThree: nothing.\nFour"
    prompt = text_prompt(tokenizer, text)
    assert ids_prompt(tokenizer, prompt.ids).breaks == prompt.breaks


def test_token_ids_keep_the_blanks_that_a_decoder_leaves_out_at_a_text_s_beginning(
    tokenizer: Any,
) -> None:
    """With the tokenizers of Llama 2 and Mistral all words of a prompt of ids were one."""
    text = "The lantern hangs here. It is old. Two more!\n\nWhere is the lantern?"
    words = [f"▁{word}" for word in re.findall(r"\w+", text)]
    vocabulary = dict.fromkeys([tokenizer.bos_token, *".!?\n", *words, "Where"])
    numbers = {word: number for number, word in enumerate(vocabulary)}
    backend = Tokenizer(WordLevel(numbers, unk_token=tokenizer.bos_token))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split(Regex(r"[.!?\n]"), "isolated")]
    )
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    used = copy.deepcopy(tokenizer)
    used._tokenizer = backend
    prompt = text_prompt(used, text)
    assert backend.decode(prompt.ids) == text
    found, starts = text_of_ids(used, prompt.ids)
    assert found.lstrip() == text
    assert starts.tolist() == [low for low, _ in prompt.offsets]
    for begin in ([], [used.bos_token_id]):
        by_ids = ids_prompt(used, [*begin, *prompt.ids])
        assert len(prompt.words) == len(by_ids.words) > 3
        for ours, theirs in zip(by_ids.words, prompt.words, strict=True):
            assert (ours - len(begin)).tolist() == theirs.tolist()
        sentences = tuple(at - len(begin) for at in by_ids.breaks.sentences)
        assert sentences == prompt.breaks.sentences != ()


def sizes(numbers: Any) -> list[int]:
    return [int((numbers == n).sum()) for n in range(1, int(numbers.max()) + 1)]


def test_a_paragraph_is_one_passage_if_it_fits() -> None:
    breaks = TextBreaks(paragraphs=(40, 100), sentences=(20, 60, 80, 130), lines=(70,))
    assert sizes(number_passages(200, breaks, 100)) == [40, 60, 100]
    # of a long paragraph as many sentences as fit
    assert sizes(number_passages(200, breaks, 70)) == [40, 60, 30, 70]
    # of a long sentence as many lines as fit; what has no break at all is in no passage
    numbers = number_passages(200, breaks, 30)
    assert (numbers[100:130] > 0).all()
    assert not numbers[130:].any()


def test_a_heading_belongs_to_what_it_heads() -> None:
    breaks = TextBreaks(paragraphs=(50, 50 + SHORTEST - 1))
    assert sizes(number_passages(100, breaks, 64)) == [50, 50]
    # but not where both are too long for one passage
    assert sizes(number_passages(100, breaks, 49)) == [SHORTEST - 1, 100 - 50 - SHORTEST + 1]


def test_a_short_first_paragraph_has_none_to_join() -> None:
    """A budget below the size of a heading ended in an IndexError."""
    breaks = TextBreaks(paragraphs=(0, 10))
    assert sizes(number_passages(26, breaks, 16)) == [10, 16]


@pytest.mark.parametrize("limit", [1, 16, 128])
def test_passages_hold_no_more_than_the_limit(limit: int) -> None:
    generator = torch.Generator().manual_seed(limit)
    draws = [torch.randint(0, 999, (n,), generator=generator).tolist() for n in (9, 60, 200)]
    paragraphs, sentences, lines = (tuple(sorted(set(found))) for found in draws)
    breaks = TextBreaks(paragraphs=paragraphs, sentences=sentences, lines=lines)
    numbers = number_passages(999, breaks, limit)
    assert max(sizes(numbers), default=0) <= limit
    inside = numbers[numbers > 0]
    assert (inside[1:] >= inside[:-1]).all()


def test_a_passage_ranks_by_its_three_best_scores() -> None:
    scores = torch.tensor([0.1, 0.9, 0.3, 0.5, 0.8, 0.0, 0.6])
    numbers = torch.tensor([1, 1, 1, 1, 2, 2, 0])
    ranks = rank_passages(scores, numbers)
    assert ranks[:4].tolist() == pytest.approx([(0.9 + 0.5 + 0.3) / 3] * 4)
    assert ranks[4:6].tolist() == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize("limit", [24, 40, 600])
def test_ranks_are_the_same_as_from_a_sort(limit: int) -> None:
    generator = torch.Generator().manual_seed(limit)
    scores = torch.randint(0, 9, (1000,), generator=generator) / 9  # many are equal
    places = torch.randint(0, 1000, (1000 // limit,), generator=generator).unique().tolist()
    numbers = number_passages(1000, TextBreaks(paragraphs=tuple(places)), limit)
    ranks = rank_passages(scores, torch.from_numpy(numbers))
    for number in set(numbers.tolist()) - {0}:
        of_passage = scores[torch.from_numpy(numbers) == number].sort(descending=True).values[:3]
        assert torch.allclose(
            ranks[torch.from_numpy(numbers) == number], of_passage.sum() / len(of_passage)
        )


def test_only_whole_passages_are_kept_and_as_many_as_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    breaks = TextBreaks(paragraphs=tuple(range(0, 3000, 70)), lines=tuple(range(0, 3000, 9)))
    for levels in (3, 50, 1 << 20):  # few: many ranks are equal
        scores = torch.randint(0, levels, (3000,), generator=generator) / levels
        is_free = np.arange(3000) >= 100
        for room in (40, 200, 1000, 2900):
            limit = Sieve().passage_limit(room)
            numbers = Sieve().passage_numbers(scores, breaks, limit)
            ranges = KeptRanges([(0, 100)])
            Sieve().ranked(scores, numbers, is_free, limit).fill(ranges, 100 + room)
            kept = ranges.is_kept(3000)
            assert kept.sum() == ranges.size
            kept &= is_free
            assert room - limit < kept.sum() <= room
            of_passage = numbers.numpy()
            for number in set(of_passage[kept].tolist()):
                assert kept[(of_passage == number) & is_free].all()


@pytest.mark.parametrize("room", [12, 40, 200])
def test_text_without_breaks_is_cut_where_ranks_are_equal(room: int) -> None:
    """Thousands of equal scores were one passage, which fitted nowhere: nothing was kept."""
    for spot in (None, 500):
        scores = torch.zeros(3000)
        if spot is not None:
            scores[spot] = 1
        limit = Sieve().passage_limit(room)
        numbers = Sieve().passage_numbers(scores, TextBreaks(), limit)
        passages = Sieve().ranked(scores, numbers, np.ones(3000, dtype=bool), limit)
        ranges = KeptRanges()
        passages.fill(ranges, room)
        kept = {p for start, stop in ranges.ranges for p in range(start, stop)}
        assert room - Sieve().passage_limit(room) < len(kept) <= room
        if spot is not None:
            assert set(range(spot - 5, spot + 6)) <= kept


def test_what_stands_between_passages_is_counted() -> None:
    breaks = TextBreaks(paragraphs=tuple(range(0, 640, 40)))
    scores = torch.zeros(640)
    scores[20::80] = 1  # every other passage
    limit = Sieve().passage_limit(256)
    numbers = Sieve().passage_numbers(scores, breaks, limit)
    passages = Sieve().ranked(scores, numbers, np.ones(640, dtype=bool), limit)

    def num_kept(most: int, num_between: int) -> int:
        kept = KeptRanges((), lambda last, first: num_between * (first > last + 1))
        passages.fill(kept, most)
        assert kept.size == 40 * len(kept.ranges) + num_between * (len(kept.ranges) - 1)
        return len(kept.ranges)

    assert num_kept(163, 0) == 4
    assert num_kept(163, 1) == 4  # three gaps of one token, and none left
    assert num_kept(162, 1) == 3


def test_coverage_is_the_share_of_the_first_sixteenth() -> None:
    generator = torch.Generator().manual_seed(0)
    for levels in (2, 5, 1 << 20):
        scores = torch.randint(0, levels, (3000,), generator=generator) / levels
        outside = torch.arange(100, 300)
        near = F.max_pool1d(scores[None], 17, stride=1, padding=8)[0]
        order = near.sort(descending=True, stable=True).indices
        order = order[(order < 100) | (order >= 300)]
        best = scores[order[: round(2800 / 16)]].sum() / scores[order].sum()
        assert Sieve().coverage(scores, outside) == pytest.approx(float(best), abs=1e-4)


def three_passages(attention: tuple[float, ...] = (0.2, 0.9, 0.5, 0.1)) -> RankedPassages:
    """Of 10 tokens each, by attention; the first is protected."""
    is_free = np.arange(40) >= 10
    starts = np.arange(0, 40, 10)
    return RankedPassages.of(starts, np.array(attention), is_free, ())


@pytest.mark.parametrize(
    ("attention", "places", "alike"),
    [
        ((0, 0.9, 0.5, 0.2), [10, 20, 30], [1, 2, 3]),
        ((0, 0.9, 0.5, 0.1), [10, 20, 30], [1, 2]),  # the last one is hardly looked at
        ((0, 0.9, 0.5, 0.4), [10, 30], [1, 3]),  # the second one has no word
        ((0, 0.9, 0.5, 0.4), [0, 10, 20, 30], [1, 2, 3]),  # the first one is protected
        ((0, 0.9, 0.5, 0.4), [], []),
        ((0, 0.0, 0.0, 0.0), [10, 20, 30], []),
    ],
)
def test_passages_are_alike_if_both_judges_find_them_so(
    attention: tuple[float, ...], places: list[int], alike: list[int]
) -> None:
    words = (np.array(places, dtype=np.uint32),)
    passages = RankedPassages.of(
        np.arange(0, 40, 10), np.array(attention), np.arange(40) >= 10, words
    )
    assert sorted(passages.alike().tolist()) == alike
    # without words nobody can say
    assert len(three_passages().alike()) == 0


def test_passages_that_are_alike_come_first() -> None:
    passages = three_passages()
    assert passages.with_first(np.array([3, 1])).order.tolist() == [3, 1, 2]
    assert passages.with_first(np.array([], dtype=np.int64)).order.tolist() == [1, 2, 3]
