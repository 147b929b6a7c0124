"""Streaming text: whole characters only, nothing of a stop string, nothing lost."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

from gemserve.decoding.detokenize import StopMatcher, TextStream, token_offsets
from gemserve.decoding.markers import NO_MARKERS, shown_markers
from tests.chat_templates import shaped_like

EMOJI = "👩‍👩‍👧‍👦🇨🇭é漢字🌍"


def byte_ids(tokenizer: Any, text: str) -> list[int]:
    """One token per UTF-8 byte, the worst a byte-level model can do."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(table[b]) for b in text.encode()]


def stream(
    tokenizer: Any,
    ids: Sequence[int],
    stop: Sequence[str] = (),
    markers: Mapping[int, str] = NO_MARKERS,
) -> tuple[list[str], bool]:
    """What is sent for `ids`, the flush last, and whether a stop string ended it."""
    text = TextStream(tokenizer, stop, markers)
    sent: list[str] = []
    for token in ids:
        sent.append(text.push(token))
        if text.is_stopped:
            break
    return [*sent, text.flush()], text.is_stopped


def test_an_emoji_split_across_tokens_arrives_whole(tokenizer: Any) -> None:
    sent, _ = stream(tokenizer, byte_ids(tokenizer, f"a{EMOJI}b"))
    assert "".join(sent) == f"a{EMOJI}b"
    assert all("\ufffd" not in part for part in sent)


def test_text_is_sent_as_soon_as_it_is_whole(tokenizer: Any) -> None:
    """Holding everything until the end also passes every other test here."""
    sent, _ = stream(tokenizer, byte_ids(tokenizer, "abc"), stop=["zz"])
    assert sent == ["a", "b", "c", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_character_is_dropped_at_the_end(tokenizer: Any, cut: int) -> None:
    sent, _ = stream(tokenizer, byte_ids(tokenizer, "ok🌍")[:-cut])
    assert "".join(sent) == "ok"


def test_special_tokens_are_not_text(tokenizer: Any) -> None:
    ids = [*byte_ids(tokenizer, "a"), tokenizer.eos_token_id, *byte_ids(tokenizer, "b")]
    assert "".join(stream(tokenizer, ids)[0]) == "ab"


def test_a_stop_string_across_tokens_leaks_no_prefix(tokenizer: Any) -> None:
    ids = byte_ids(tokenizer, "one STOP two")
    sent, is_stopped = stream(tokenizer, ids, stop=["STOP"])
    assert is_stopped
    assert "".join(sent) == "one "


def test_an_emoji_stop_string_is_found(tokenizer: Any) -> None:
    sent, is_stopped = stream(tokenizer, byte_ids(tokenizer, "ab🌍c"), stop=["🌍"])
    assert (is_stopped, "".join(sent)) == (True, "ab")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),
        ("aaaaab!", ["aab"], "aaa"),
        ("ababac", ["abac"], "ab"),
        ("\n\n\n\nQ", ["\n\nQ"], "\n\n"),
        ("abcabcabd", ["abcabd"], "abc"),
    ],
)
def test_a_stop_string_that_overlaps_itself(
    tokenizer: Any, text: str, stop: list[str], expected: str
) -> None:
    sent, is_stopped = stream(tokenizer, byte_ids(tokenizer, text), stop)
    assert (is_stopped, "".join(sent)) == (True, expected)


def test_the_earliest_of_several_stops_wins(tokenizer: Any) -> None:
    one_token = tokenizer.encode(" the", add_special_tokens=False)
    assert len(one_token) == 1
    for stops in (["e", "h"], ["h", "e"]):
        sent, is_stopped = stream(tokenizer, one_token, stops)
        assert (is_stopped, "".join(sent)) == (True, " t")
    sent, _ = stream(tokenizer, byte_ids(tokenizer, "xxAyyB"), ["B", "A", "never"])
    assert "".join(sent) == "xx"


def test_flush_releases_what_never_became_a_stop_string(tokenizer: Any) -> None:
    sent, is_stopped = stream(tokenizer, byte_ids(tokenizer, "one ST"), stop=["STOP"])
    assert sent[-1] == "ST"
    assert not is_stopped
    assert "".join(sent) == "one ST"


def test_flush_twice_adds_nothing(tokenizer: Any) -> None:
    text = TextStream(tokenizer, ["STOP"])
    for token in byte_ids(tokenizer, "ST"):
        text.push(token)
    assert (text.flush(), text.flush()) == ("ST", "")


def test_an_empty_answer_is_empty(tokenizer: Any) -> None:
    assert TextStream(tokenizer, []).flush() == ""


def test_a_lone_bad_byte_does_not_eat_its_neighbours(tokenizer: Any) -> None:
    head, tail = byte_ids(tokenizer, "ab"), byte_ids(tokenizer, "cd")
    sent, _ = stream(tokenizer, [*head, *byte_ids(tokenizer, "🌍")[:2], *tail])
    assert "".join(sent) == "ab\ufffdcd"


def test_streamed_text_is_the_whole_text(tokenizer: Any) -> None:
    """Random tokens: bytes that make no character, specials, pieces of emoji."""
    size = len(tokenizer.get_vocab())
    single = byte_ids(tokenizer, EMOJI)
    for seed in range(200):
        rng = random.Random(seed)
        ids = [
            rng.choice(single) if rng.random() < 0.5 else rng.randrange(size)
            for _ in range(rng.randrange(1, 60))
        ]
        sent, _ = stream(tokenizer, ids)
        whole = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(sent).rstrip("\ufffd") == whole.rstrip("\ufffd"), f"seed {seed}: {ids}"


def test_stopped_text_is_the_whole_text_cut(tokenizer: Any) -> None:
    """Nothing of the stop string is sent, everything before it is, however tokens fall."""
    for seed in range(100):
        rng = random.Random(seed)
        text = "".join(rng.choice("ab🌍 ") for _ in range(40))
        stop = "".join(rng.choice("ab🌍 ") for _ in range(rng.randrange(1, 5)))
        for ids in (byte_ids(tokenizer, text), tokenizer.encode(text, add_special_tokens=False)):
            sent, is_stopped = stream(tokenizer, ids, [stop])
            assert "".join(sent) == text.split(stop)[0], f"seed {seed}"
            assert is_stopped == (stop in text)


def test_a_stop_string_before_min_tokens_is_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("aXbXc", add_special_tokens=False)
    stream = TextStream(tokenizer, ["X"])
    text = ""
    for index, token in enumerate(ids):
        text += stream.push(token, may_stop=index >= 3)
        if stream.is_stopped:
            break
    assert text + stream.flush() == "aXb"
    assert stream.is_stopped


def test_the_stop_string_that_ended_the_text_is_known(tokenizer: Any) -> None:
    """Anthropic's protocol names it; the first one in the text counts, not in the list."""
    text = TextStream(tokenizer, ["never", "two", "ONE"])
    for token in byte_ids(tokenizer, "zero ONE two"):
        assert text.stopped_by is None
        text.push(token)
        if text.is_stopped:
            break
    assert text.stopped_by == "ONE"


def test_a_long_stop_string_that_keeps_matching_costs_no_more_with_time() -> None:
    """Each token compared all of the text held so far: a client could slow down everybody."""
    stop = StopMatcher("a" * 100_000 + "b")
    started_s = time.perf_counter()
    for _ in range(20_000):
        assert stop.find_end("aaaa") is None
    assert stop.num_matched == 80_000
    assert stop.find_end("c" + "a" * 100_000) is None
    assert stop.find_end("ab") == 2
    assert time.perf_counter() - started_s < 5  # it takes 0.06 s


def test_a_stop_string_is_found_where_a_search_in_the_whole_text_finds_it() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice("ab") for _ in range(60))
        stop = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 9)))
        matcher, at, found = StopMatcher(stop), 0, -1
        while at < len(text) and found < 0:
            piece = text[at : at + rng.randrange(1, 6)]
            end = matcher.find_end(piece)
            found = -1 if end is None else at + end - len(stop)
            at += len(piece)
            if end is None:
                ends = [n for n in range(len(stop)) if text[:at].endswith(stop[:n])]
                assert matcher.num_matched == max(ends), f"seed {seed}"
        assert found == text.find(stop), f"seed {seed}"


def test_what_has_no_text_costs_no_more_with_time(tokenizer: Any) -> None:
    """Every step decoded all tokens since the last one with a text: 6 ms behind 30,000 of them."""
    for ids in ([tokenizer.eos_token_id], byte_ids(tokenizer, "é")[:1]):
        began_s = time.process_time()
        sent, _ = stream(tokenizer, [*byte_ids(tokenizer, "a"), *ids * 20_000])
        assert time.process_time() - began_s < 2
        assert "".join(sent) in ("a", "a" + "\ufffd" * 19_998)
        assert "".join(sent) == tokenizer.decode(
            [*byte_ids(tokenizer, "a"), *ids * 19_998], skip_special_tokens=True
        )


def like_llama_s() -> Any:
    """A tokenizer that leaves out the blank with which a text begins."""
    words = {word: number for number, word in enumerate(["▁The", "▁city", "▁is", "▁Paris", "s"])}
    backend = Tokenizer(WordLevel(words, unk_token="s"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return SimpleNamespace(backend_tokenizer=backend)


def test_a_text_that_goes_on_with_another_keeps_its_first_blank() -> None:
    """`The city is` became `The city isParis` with the tokenizers of Llama 2, Mistral and Phi-3."""
    for before, expected in (([0, 1, 2], " Paris"), ([], "Paris")):
        text = TextStream(like_llama_s(), ["s is"], before=before)
        sent = [text.push(token) for token in (3, 4, 1)]
        assert "".join([*sent, text.flush()]) == f"{expected}s city"
        offsets = token_offsets(like_llama_s(), (3, 4, 1), before=before)
        assert offsets == [0, len(expected), len(expected) + 1]


def test_markers_are_shown_although_they_are_control_tokens(tokenizer: Any) -> None:
    """Mistral's and gpt-oss's calls lost theirs, and were no calls any more."""
    used = shaped_like(tokenizer, "mistral_args")
    ids = used.encode("é[TOOL_CALLS]find[ARGS]{}[/INST]!", add_special_tokens=False)
    markers = shown_markers(used, ())
    assert set(markers.values()) == {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
    for shown, text in (({}, "éfind{}!"), (markers, "é[TOOL_CALLS]find[ARGS]{}!")):
        assert "".join(stream(used, ids, (), shown)[0]) == text
    sent, is_stopped = stream(used, ids, ("find[ARGS]",), markers)
    assert ("".join(sent), is_stopped) == ("é[TOOL_CALLS]", True)
    # "<|end|>" means something else beside "<|channel|>" than without it, and may end an answer
    assert shown_markers(shaped_like(tokenizer, "phi3"), ()) == {}
    harmony = shown_markers(shaped_like(tokenizer, "gpt_oss"), (2,))
    assert "<|channel|>" in harmony.values()
    assert 2 not in harmony


def test_a_blank_behind_broken_characters_is_kept() -> None:
    """Decoding begins anew behind them, but not the text."""
    words = {"▁The": 0, "▁city": 1, "s": 2, **{f"<0x{n:02X}>": n for n in range(128, 192)}}
    backend = Tokenizer(WordLevel(words, unk_token="s"))
    backend.decoder = like_llama_s().backend_tokenizer.decoder
    text = TextStream(SimpleNamespace(backend_tokenizer=backend), [])
    sent = [text.push(token) for token in (0, *[130] * 9, 1, 0)]
    assert "".join([*sent, text.flush()]) == "The" + "\ufffd" * 9 + " city The"


def with_byte_fallback(words: Sequence[str]) -> Any:
    """A tokenizer whose first 256 tokens are bytes, like Llama 2's, and whose others are `words`"""
    every = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", *words]
    merges = [(word[0], word[1:]) for word in words if word[1:]]
    vocabulary = {word: number for number, word in enumerate(every)}
    backend = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.decoder = like_llama_s().backend_tokenizer.decoder
    return SimpleNamespace(backend_tokenizer=backend)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a", "😀".encode(), "😀".encode()[:3], "▁a", "b"], "a😀\ufffd\ufffd\ufffd ab"),
        (["é".encode() * 99, b"\x80" * 9, "b"], "é" * 99 + "\ufffd" * 9 + "b"),
        (["é".encode(), b"\x80" * 9, "▁b"], "é" + "\ufffd" * 9 + " b"),
        (["é".encode(), b"\x80" * 30, "b"], "é" + "\ufffd" * 30 + "b"),
        (["a", b"\x80", "é".encode(), "b"], "a\ufffd\ufffd\ufffdb"),
    ],
)
def test_bytes_of_no_character_behind_a_whole_one(pieces: list[str | bytes], expected: str) -> None:
    """The library raised "Invalid prefix", which ended the answer, or its last byte came again."""
    used = with_byte_fallback(["a", "b", "▁a", "▁b"])
    number = used.backend_tokenizer.token_to_id
    ids = [i for piece in pieces for i in (piece if isinstance(piece, bytes) else [number(piece)])]
    sent, _ = stream(used, ids)
    assert "".join(sent) == expected
    assert token_offsets(used, ids)[-1] == len(expected) - len(sent[-2])
