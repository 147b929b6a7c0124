"""The inspector page asks a question, with a server that answers as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_inspector_choices import told_by

# `asked` has the paths of requests in their order, and `ended` those of replies that were ended.
ASKING = """
globalThis.sessionStorage = {getItem: () => null};
globalThis.document = {baseURI: "http://localhost/"};
const asked = [], ended = [];
const written = (event) => new TextEncoder().encode(`data: ${event}\\n\\n`);
let events = [];
globalThis.fetch = async (url) => {
  const path = new URL(url).pathname;
  asked.push(`begin ${path}`);
  await new Promise((done) => setTimeout(done, 20));
  asked.push(`end ${path}`);
  if (path === "/tokenize") return new Response(JSON.stringify({text: "ab", offsets: [0, 1]}));
  return new Response(new ReadableStream({
    start: (stream) => events.forEach((event) => stream.enqueue(written(event))),
    cancel: () => ended.push(path),
  }));
};
const {answer, otherOf} = await import(%s);
const report = {kept_tokens: 300, protected_tokens: 40};
const request = {path: "v1/completions", body: {prompt: "ab", filter: {}}};
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(
            """
            events = [JSON.stringify({choices: [{text: "c"}]}), "[DONE]"];
            await answer({request, answer: ""}, undefined, () => {});
            console.log(JSON.stringify(asked));
            """,
            [
                "begin /tokenize",
                "end /tokenize",
                "begin /v1/completions",
                "end /v1/completions",
            ],
            id="a key with one request at a time was refused the second",
        ),
        pytest.param(
            """
            events = [JSON.stringify({error: {message: "no"}})];
            await answer({request, isOther: true}, undefined, () => {}).catch(() => {});
            console.log(JSON.stringify(ended));
            """,
            ["/v1/completions"],
            id="a stream that is no longer read was left open",
        ),
        pytest.param(
            """
            const keeps = ["sieve", "position", "random", "gemfilter", "none"].map(
              (method) => otherOf({report, request}, method).request.body.filter.keep ?? null
            );
            report.kept_tokens = 50;
            const few = otherOf({report, request}, "random").request.body.filter.keep;
            console.log(JSON.stringify([...keeps, few]));
            """,
            [260, 260, 260, 300, None, 16],
            id="what is always read came in addition to as many tokens",
        ),
    ],
)
def test_a_question_is_asked(tmp_path: Path, program: str, expected: object) -> None:
    assert told_by(tmp_path, ASKING, "asking.js", program) == expected
