// What the page does, as a command or a program, and as a file that needs no server.

import { addressOf } from "./server.js";
import { answerWords, keptWords } from "./words.js";

/** `request`: {path, body}. The document may be long, so it is read from a file. */
export function curl({ path, body }) {
  const plain = JSON.stringify(withPlaceholder(body), null, 2).replaceAll("'", "'\\''");
  return `# document.txt holds the document; jq puts it into the request
jq -n --rawfile document document.txt '${jqOf(plain)}' |
curl -sS '${addressOf(path)}' \\
  -H "Authorization: Bearer $GEMSERVE_API_KEY" \\
  -H "Content-Type: application/json" \\
  --data-binary @-
`;
}

const PLACE = "{document}";

/** The body with a placeholder instead of the document. */
function withPlaceholder({ document: _, question, ...body }) {
  const words = `${PLACE}\n\n${question}`;
  const { return_scores: __, return_attention: ___, ...filter } = body.filter; // only the page needs them
  const rest = { ...body, filter };
  if (rest.messages) return { ...rest, messages: [{ role: "user", content: words }] };
  return { ...rest, prompt: words };
}

/** In a program of jq, a string may have a variable in it. */
function jqOf(plain) {
  return plain.replace(PLACE, "\\($document)");
}

export function python({ path, body }) {
  const asked = withPlaceholder(body);
  const isChat = Boolean(asked.messages);
  const call = isChat ? "client.chat.completions.create" : "client.completions.create";
  const prompt = isChat
    ? 'messages=[{"role": "user", "content": f"{document}\\n\\n{question}"}],'
    : 'prompt=f"{document}\\n\\n{question}",';
  const answer = isChat ? "reply.choices[0].message.content" : "reply.choices[0].text";
  return `import os
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(addressOf("v1"))}, api_key=os.environ.get("GEMSERVE_API_KEY", "none"))
document = Path("document.txt").read_text("utf-8")
question = ${JSON.stringify(body.question)}
reply = ${call}(
    model=${JSON.stringify(body.model)},
    ${prompt}
    max_tokens=${body.max_tokens},
    temperature=${body.temperature},
    extra_body={"filter": ${pythonOf(asked.filter)}},
)
print(${answer})
print(reply.filter["kept_tokens"], "of", reply.filter["prompt_tokens"], "tokens kept")
`;
}

function pythonOf(value) {
  return JSON.stringify(value)
    .replaceAll(":true", ": True")
    .replaceAll(":false", ": False")
    .replaceAll('":', '": ')
    .replaceAll(":  ", ": ")
    .replaceAll(",", ", ");
}

export function node({ path, body }) {
  const asked = withPlaceholder(body);
  const isChat = Boolean(asked.messages);
  const call = isChat ? "client.chat.completions.create" : "client.completions.create";
  const prompt = isChat
    ? "messages: [{ role: 'user', content: `${text}\\n\\n${question}` }],"
    : "prompt: `${text}\\n\\n${question}`,";
  const answer = isChat ? "reply.choices[0].message.content" : "reply.choices[0].text";
  return `import { readFile } from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: ${JSON.stringify(addressOf("v1"))},
  apiKey: process.env.GEMSERVE_API_KEY ?? "none",
});
const text = await readFile("document.txt", "utf8");
const question = ${JSON.stringify(body.question)};
const reply = await ${call}({
  model: ${JSON.stringify(body.model)},
  ${prompt}
  max_tokens: ${body.max_tokens},
  temperature: ${body.temperature},
  filter: ${JSON.stringify(asked.filter)},
});
console.log(${answer});
console.log(reply.filter.kept_tokens, "of", reply.filter.prompt_tokens, "tokens kept");
`;
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

const STYLE = `body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c1917;background:#fff}
.answer{white-space:pre-wrap}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:15px/1.6 Georgia,serif;color:#6b6b6b}
mark{color:#1c1917;background:#ccf0ea}
@media(prefers-color-scheme:dark){body{color:#f5f5f4;background:#1c1917}pre{color:#a09a95}mark{color:#fff;background:#134e4a}}`;

/** One HTML file of an entry and what is shown of it. It runs no script and loads nothing. */
export function pageOf(entry, view) {
  const { text, starts, report } = entry;
  const parts = [];
  for (let i = 0; i < starts.length; ) {
    let j = i;
    while (j < starts.length && view.kept[j] === view.kept[i]) j++;
    const high = j < starts.length ? starts[j] : text.length;
    const words = escaped(text.slice(i === 0 ? 0 : starts[i], high));
    parts.push(view.kept[i] ? `<mark>${words}</mark>` : words);
    i = j;
  }
  const facts = [
    keptWords(report, view.isReply ? null : view),
    ...answerWords(entry),
  ];
  const { other } = entry;
  const source = other?.isWhole ? "from the whole prompt" : `of ${other?.method}`;
  const whole = other ? `<h2>Answer ${source}</h2><p class="answer">${escaped(other.answer)}</p>` : "";
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width"><title>${escaped(entry.question)}</title>
<style>${STYLE}</style></head><body><main>
<h1>${escaped(entry.question)}</h1>
<h2>Answer</h2><p class="answer">${escaped(entry.answer)}</p>${whole}
<h2>What the filter kept</h2>
<p>Model ${escaped(entry.request.body.model)}, method ${escaped(report.method)}. ${facts.filter(Boolean).map(escaped).join(" ")} Marked text was kept. This shows what the filter kept, not why the model answered.</p>
<pre>${parts.join("")}</pre></main></body></html>
`;
}

/** Let the browser save a text as a file. */
export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
