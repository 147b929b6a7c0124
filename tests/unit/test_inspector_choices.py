"""The inspector page asks the server for other choices, and shows only what is wanted last."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "server/gemserve/inspector"
# `asked` holds what has been sent; each is answered by hand, in any order.
CHOICES = """
import {Choices} from %s;
const asked = [];
const choices = new Choices((entry, budget, signal) => new Promise((reply, fail) => {
  signal.addEventListener("abort", () => fail(new DOMException("", "AbortError")));
  asked.push({entry, budget, signal, reply, fail});
}), 10);
const entry = {}, other = {};
const pause = () => new Promise((done) => setTimeout(done, 60));
const budgets = () => asked.map(({budget}) => budget);
"""
HEAT = """
import {heatOf, heatOfHeads} from %s;
const text = (values) => btoa(String.fromCharCode(...new Uint8Array(values.buffer)));
const inputs = {protected: [[4, 6, 1], [0, 1, 7]]};
const tokens = text(new Float32Array([1, 4, 0, 0, 9, 9, 4]));
"""


def told_by(folder: Path, imports: str, file: str, program: str) -> Any:
    """What a program for node prints, as JSON."""
    node = shutil.which("node", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if node is None:
        pytest.skip("there is no node")
    path = folder / "program.mjs"
    path.write_text(imports % json.dumps((PAGE / file).as_uri()) + program, encoding="utf-8")
    done = subprocess.run([node, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(
            """
            const first = [64, 100, 300].map((budget) => choices.wanted(entry, budget));
            await pause();
            asked[0].reply("of 300");
            console.log(JSON.stringify([budgets(), await Promise.all(first)]));
            """,
            [[300], [None, None, "of 300"]],
            id="a slider that moves asks once",
        ),
        pytest.param(
            """
            const old = choices.wanted(entry, 64);
            await pause();
            const wanted = choices.wanted(entry, 100);
            const isCancelled = asked[0].signal.aborted;
            asked[0].reply("of 64");
            await pause();
            asked[1].reply("of 100");
            console.log(JSON.stringify([isCancelled, await old, await wanted]));
            """,
            [True, None, "of 100"],
            id="an older reply is never shown after a newer wish",
        ),
        pytest.param(
            """
            const first = choices.wanted(entry, 64);
            await pause();
            asked[0].reply("of 64");
            await first;
            const again = await choices.wanted(entry, 64);
            choices.wanted(other, 64);
            await pause();
            console.log(JSON.stringify([again, asked.length, asked[1].entry === other]));
            """,
            ["of 64", 2, True],
            id="a known budget is not asked again, of the same question",
        ),
        pytest.param(
            """
            const wishes = [{keep: 64}, {keep: 64, heads: [[1, 0]]}, {keep: 64, heads: [[1, 0]]}];
            const told = [];
            for (const wish of wishes) {
              const wanted = choices.wanted(entry, wish);
              await pause();
              asked.at(-1).reply(`of ${asked.length}`);
              told.push(await wanted);
            }
            console.log(JSON.stringify([told, budgets()]));
            """,
            [["of 1", "of 2", "of 2"], [{"keep": 64}, {"keep": 64, "heads": [[1, 0]]}]],
            id="other heads are another choice, which is remembered, too",
        ),
        pytest.param(
            """
            const waiting = choices.wanted(entry, 64);
            choices.cancel();
            await pause();
            const sent = choices.wanted(entry, 100);
            await pause();
            choices.cancel();
            console.log(JSON.stringify([await waiting, await sent, budgets()]));
            """,
            [None, None, [100]],
            id="what is cancelled is not sent, and its end is no error",
        ),
        pytest.param(
            """
            const failed = choices.wanted(entry, 64).catch((error) => error.message);
            await pause();
            asked[0].fail(new Error("busy"));
            const message = await failed;
            const again = choices.wanted(entry, 64);
            await pause();
            asked[1].reply("of 64");
            console.log(JSON.stringify([message, await again]));
            """,
            ["busy", "of 64"],
            id="a failure is told, and not remembered",
        ),
        pytest.param(
            """
            for (let budget = 0; budget < 101; budget++) {
              const wanted = choices.wanted(entry, budget);
              while (asked.length === budget) await new Promise((done) => setTimeout(done, 1));
              asked[budget].reply("known");
              await wanted;
            }
            const newest = await choices.wanted(entry, 100);
            choices.wanted(entry, 0);
            await pause();
            console.log(JSON.stringify([newest, asked.length, asked[101].budget]));
            """,
            ["known", 102, 0],
            id="the oldest replies are forgotten",
        ),
    ],
)
def test_choices(tmp_path: Path, program: str, expected: Any) -> None:
    assert told_by(tmp_path, CHOICES, "choices.js", program) == expected


WORDS = """
import {answerWords} from %s;
const report = {window: 1024, windows: 1200, cached_windows: 7, cached_tokens: 5000, applied: true};
const words = (more) => answerWords({report: {...report, coverage: null, ...more}, firstMs: null});
"""


def test_windows_are_told(tmp_path: Path) -> None:
    program = (
        "console.log(JSON.stringify([words({}), words({windows: null})].map((w) => w.at(-1))))"
    )
    in_windows = (
        "The documents were read in 1,200 windows of at most 1,024 tokens; 7 of them were already "
        "in the document cache."
    )
    one_pass = "5,000 tokens were already in the document cache."
    assert told_by(tmp_path, WORDS, "words.js", program) == [in_windows, one_pass]


SIZES = """
import {sizeWords} from %s;
const told = [[4000, 2000, 0], [40000, 2000, 2000], [40000, 2000, 1 << 20]].map(
  ([length, limit, longest]) => sizeWords(length, "m", limit, longest),
);
console.log(JSON.stringify(told.map(({text, isTooLong}) => [text.split("tokens")[1], isTooLong])));
"""


def test_a_document_beyond_the_context_can_be_filtered(tmp_path: Path) -> None:
    """With windows a server takes prompts that do not fit into the model's context."""
    takes = "m takes 2,000 with the answer."
    assert told_by(tmp_path, SIZES, "words.js", "") == [
        [f"; {takes}", False],
        [f": probably too long, {takes}", True],
        [f": it can be filtered, not read whole, {takes}", False],
    ]


def test_a_question_s_own_tokens_have_no_heat(tmp_path: Path) -> None:
    """They attend to each other: without this the strongest place is always the question."""
    program = """
        const heat = heatOf({inputs, tokens, passages: [[2, 4, 51]]});
        console.log(JSON.stringify([...heat].map((value) => Math.round(1000 * value))));
    """
    assert told_by(tmp_path, HEAT, "heat.js", program) == [500, 1000, 200, 200, 0, 0, 1000]


def test_heads_colour_whole_passages(tmp_path: Path) -> None:
    program = """
        const heads = [[0, 8, 0, 10, 99, 99, 5], [0, 2, 20, 0, 99, 99, 5]];
        const bytes = heads.map((each) => ({bytes: Uint8Array.from(each)}));
        const heat = heatOfHeads({passages: [[2, 4, 51]], inputs}, bytes);
        const none = heatOfHeads({passages: [], inputs}, []);
        const without = heatOf({tokens, inputs: null, passages: []});
        console.log(JSON.stringify([[...heat].map((v) => Math.round(100 * v)), none, without]));
    """
    expected = [[0, 40, 100, 100, 0, 0, 25], None, None]
    assert told_by(tmp_path, HEAT, "heat.js", program) == expected
