// Shows what two answers were given from, and which passages a sentence of the answer leaned on.

import { differencesOf, keptOf } from "./differences.js";
import { leanedOn } from "./leaning.js";
import { $, state } from "./page.js";
import { show, text, whenOpened } from "./shown.js";
import { count, headsWords, share } from "./words.js";

const MOST_CHARS = 160; // of a passage in a list

whenOpened(showDifferences);

/** Compare with the other answer, if there is one that has been reported. */
export function showDifferences() {
  const { entry } = state;
  const other = entry?.other;
  const isThere = Boolean(other?.report);
  $("differences").hidden = !isThere;
  if (!isThere) return;
  const n = entry.starts.length;
  const [first, second] = [keptOf(entry.report, n), keptOf(other.report, n)];
  const names = [entry.report.method, other.isWhole ? "the whole prompt" : other.method];
  const { both, first: here, second: there } = differencesOf(first, second);
  $("differences-words").textContent =
    `Both kept ${told(both)}. Only ${names[0]} kept ${told(here)}. Only ${names[1]} kept ${told(there)}.`;
  $("differences-lists").replaceChildren(
    ...[
      ["Both kept", both],
      [`Only ${names[0]} kept`, here],
      [`Only ${names[1]} kept`, there],
    ].map(([title, kind]) => listOf(title, kind.passages, kind.count)),
  );
  show({ ...state.view, other: $("differ").checked ? second : null });
}

function told({ tokens, count: passages }) {
  return `${count(tokens)} tokens in ${count(passages)} ${passages === 1 ? "passage" : "passages"}`;
}

function listOf(title, passages, all) {
  const part = document.createElement("details");
  const summary = document.createElement("summary");
  const cut = all > passages.length ? `, the first ${passages.length} of ${count(all)}` : "";
  summary.textContent = `${title}${cut}`;
  const list = document.createElement("ul");
  list.append(...passages.map(([start, stop]) => itemOf(start, stop, "")));
  part.append(summary, list);
  part.hidden = passages.length === 0;
  return part;
}

/** A passage as a button that scrolls to it. */
function itemOf(start, stop, note) {
  const { starts, text: whole } = state.entry;
  const words = whole.slice(starts[start], stop < starts.length ? starts[stop] : whole.length);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "passage";
  const line = words.replace(/\s+/g, " ").trim();
  const cut = line.length > MOST_CHARS ? `${line.slice(0, MOST_CHARS)}…` : line || "(space)";
  button.textContent = note ? `${note} ${cut}` : cut;
  button.addEventListener("click", () => text.scrollTo(start));
  const item = document.createElement("li");
  item.append(button);
  return item;
}

/** Show which passages a sentence of an entry's answer leaned on. `open` shows the entry first. */
export function showLeaning(entry, range, button, open) {
  if (state.entry !== entry) open(entry);
  for (const each of document.querySelectorAll(".sentence")) each.removeAttribute("aria-pressed");
  button.setAttribute("aria-pressed", "true");
  const passages = leanedOn(entry.attention, entry.answer, range);
  text.marked = passages.map(({ start, stop }) => [start, stop]);
  text.show(state.view);
  $("leaned-words").textContent = passages.length
    ? `While this sentence was written, what the filter chooses by (${headsWords(entry.attention.heads)}) attended most to:`
    : "Nothing is known of this sentence: only the first 1,024 tokens of an answer are watched.";
  const items = passages.map(({ start, stop, share: part }) => itemOf(start, stop, `${share(part, 1)} ·`));
  $("leaned-list").replaceChildren(...items);
  $("leaned").hidden = false;
  if (passages.length) text.scrollTo(passages[0].start);
}

/** Show no sentence's passages any more. */
export function hideLeaning() {
  for (const each of document.querySelectorAll(".sentence")) each.removeAttribute("aria-pressed");
  $("leaned").hidden = true;
  text.marked = [];
  text.show(state.view);
}
