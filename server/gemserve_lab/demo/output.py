"""Prints the demo's results: both answers, and what the filter kept in its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve_lab.demo.demo_server import Result
from gemserve_lab.demo.document import HiddenFact

_NEAR = 3  # kept passages shown on either side of the fact
_SHORT = 84  # characters of a passage without the fact
_EDGE = 36  # characters shown of either end of dropped text

Range = tuple[int, int]


def print_table(results: dict[str, Result], verdicts: dict[str, bool]) -> None:
    """One line for each answer: right or wrong, tokens read, time and memory."""
    print(
        f"{'':<20}{'answer':<8}{'tokens read':>12}{'kept':>8}{'coverage':>10}{'TTFT':>10}"
        f"{'KV peak':>12}{'KV decoding':>13}"
    )
    for label, result in results.items():
        report, coverage = result.report, result.report.get("coverage")
        print(
            f"{label:<20}{'right' if verdicts[label] else 'wrong':<8}"
            f"{report['prompt_tokens']:>12,}{report['kept_tokens']:>8,}"
            f"{'–' if coverage is None else f'{coverage:.2f}':>10}{result.ttft_s:>9.2f}s"
            f"{_mib(result.peak_kv_bytes):>12}{_mib(result.decode_kv_bytes):>13}"
        )


def print_savings(whole: Result, filtered: Result) -> None:
    """Print how much lower time and memory are; or why nothing was filtered."""
    report = filtered.report
    if not report["applied"]:
        print(f"\nThe filter read everything: its reason is {report['reason']}.")
        return
    peak = filtered.peak_kv_bytes / whole.peak_kv_bytes
    decode = filtered.decode_kv_bytes / whole.decode_kv_bytes
    print(
        f"\n{report['method']} at layer {report['layer']}: TTFT is "
        f"{whole.ttft_s / filtered.ttft_s:.1f} times lower, the KV cache has {peak:.0%} of the "
        f"size at its peak and {decode:.0%} while the answer is generated."
    )


def print_kept(tokenizer: Any, hidden: HiddenFact, selection: Sequence[Sequence[int]]) -> None:
    """Print the kept passages around the fact. Those that hold it are shown in full."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": hidden.prompt}], add_generation_prompt=True, tokenize=False
    )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    kept = KeptPassages(text, encoding["offset_mapping"], [(a, b) for a, b in selection])
    print("\nKept (► holds the fact), and between the lines what was dropped:")
    for line in kept.lines(hidden.statement):
        print(line)


@dataclass(frozen=True, slots=True)
class KeptPassages:
    """A prompt's text, where each token is in it, and the half-open ranges that were kept."""

    text: str
    offsets: Sequence[Range]
    ranges: Sequence[Range]

    def lines(self, statement: str) -> list[str]:
        """Lines that show the passages next to the statement and count those further away."""
        low = self.text.find(statement)
        high = low + len(statement)
        holds = [self._chars(r)[0] < high and self._chars(r)[1] > low for r in self.ranges]
        near = {j for i, is_held in enumerate(holds) if is_held for j in self._around(i)}
        near = near or set(range(min(2 * _NEAR, len(self.ranges))))
        lines: list[str] = []
        skipped: list[Range] = []
        end = self.ranges[0][0] if self.ranges else 0
        for i, passage in enumerate(self.ranges):
            if i not in near:
                skipped.append(passage)
                continue
            if skipped:
                lines.append(_counted(skipped))
                skipped = []
            elif passage[0] > end:
                lines.append(self._dropped((end, passage[0])))
            lines.append(self._passage(passage, holds[i]))
            end = passage[1]
        return [*lines, _counted(skipped)] if skipped else lines

    def _around(self, index: int) -> range:
        return range(max(0, index - _NEAR), min(len(self.ranges), index + _NEAR + 1))

    def _chars(self, tokens: Range) -> Range:
        return self.offsets[tokens[0]][0], self.offsets[tokens[1] - 1][1]

    def _words(self, tokens: Range) -> str:
        low, high = self._chars(tokens)
        return " ".join(self.text[low:high].split())

    def _passage(self, tokens: Range, is_held: bool) -> str:
        words = self._words(tokens)
        if not is_held and len(words) > _SHORT:
            words = _ends(words, _SHORT // 2)
        mark = "►" if is_held else " "
        return f" {mark} [{tokens[0]:>6,}, {tokens[1]:>6,})  {words}"

    def _dropped(self, tokens: Range) -> str:
        words = self._words(tokens)
        if len(words) > 2 * _EDGE:
            words = _ends(words, _EDGE)
        return f"       − {tokens[1] - tokens[0]:>5,} tokens   ({words})"


def _ends(words: str, num_chars: int) -> str:
    """The first and the last words of a text, up to so many characters of each."""
    return f"{words[:num_chars].rpartition(' ')[0]} … {words[-num_chars:].partition(' ')[2]}"


def _counted(passages: Sequence[Range]) -> str:
    kept = sum(stop - start for start, stop in passages)
    places = f"{passages[0][0]:,} to {passages[-1][1]:,}"
    return f"   …  {kept:,} tokens in {len(passages)} more kept passages, from {places}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
