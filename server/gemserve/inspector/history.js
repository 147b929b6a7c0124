// The questions that were asked about the document, with their answers.

import { sentencesOf } from "./leaning.js";
import { count, seconds } from "./words.js";

/** One question. `other`: another answer to it, if it was asked for: of the whole prompt, perhaps. */
export function newEntry(fields) {
  return {
    text: "", // of the prompt, as it was tokenized
    starts: new Uint32Array(0),
    answer: "",
    report: null,
    scores: null, // of the reply
    heat: null, // of each token
    firstMs: null,
    estimateMs: null,
    error: "",
    isRunning: true,
    isCut: false, // it has as many tokens as were allowed
    heads: [], // scores of single heads
    attention: null, // of the answer's tokens
    other: null,
    ...fields,
  };
}

/** A card that shows an entry; `onOpen` is called when it is chosen, `onSentence` with a sentence. */
export class Card {
  constructor(entry, onOpen, onSentence) {
    this.entry = entry;
    this.onSentence = onSentence;
    this.element = document.createElement("article");
    this.element.className = "card";
    this.title = document.createElement("button");
    this.title.type = "button";
    this.title.className = "question";
    this.title.textContent = entry.question;
    this.title.addEventListener("click", () => onOpen(entry));
    const heading = document.createElement("h3");
    heading.append(this.title);
    this.answers = document.createElement("div");
    this.answers.className = "answers";
    this.element.append(heading, this.answers);
    this.answer = this.column("Answer from what was kept");
    this.other = null;
    this.update();
  }

  column(label) {
    const part = document.createElement("section");
    const name = document.createElement("h4");
    name.textContent = label;
    const text = document.createElement("p");
    text.className = "answer";
    const note = document.createElement("p");
    note.className = "note";
    part.append(name, text, note);
    this.answers.append(part);
    return { name, text, note };
  }

  update() {
    const { entry } = this;
    if (entry.report && !entry.report.applied) this.answer.name.textContent = "Answer from the whole prompt";
    if (entry.error && !entry.answer) this.answer.name.textContent = "No answer";
    fill(this.answer, entry);
    if (entry.attention && !entry.isRunning && this.cut !== entry.answer) this.cutSentences();
    if (!entry.other) return;
    this.other ??= this.column("");
    this.other.name.textContent = entry.other.isWhole ? "Answer from the whole prompt" : `Answer of ${entry.other.method}`;
    if (entry.report?.applied) this.answer.name.textContent = `Answer of ${entry.report.method}`;
    this.answers.classList.add("beside");
    fill(this.other, entry.other);
  }

  /** Make each sentence of the answer a button. */
  cutSentences() {
    const { answer } = this.entry;
    this.cut = answer;
    const parts = sentencesOf(answer).map(([low, high]) => {
      const part = document.createElement("button");
      part.type = "button";
      part.className = "sentence";
      part.title = "Show which kept passages this sentence leaned on";
      part.textContent = answer.slice(low, high);
      part.addEventListener("click", () => this.onSentence(this.entry, [low, high], part));
      return part;
    });
    this.answer.text.replaceChildren(...parts);
  }

  select(isSelected) {
    this.element.classList.toggle("selected", isSelected);
    if (isSelected) this.title.setAttribute("aria-current", "true");
    else this.title.removeAttribute("aria-current");
  }
}

function fill(column, { answer, isRunning, isCut, error, firstMs, request }) {
  if (column.text.textContent !== answer) column.text.textContent = answer;
  column.text.classList.toggle("running", isRunning);
  const time = firstMs === null ? "" : `First word after ${seconds(firstMs)}.`;
  const cut = isCut ? `It ends after ${count(request.body.max_tokens)} tokens, the longest answer of the options.` : "";
  column.note.textContent = error || (isRunning && !answer ? "Reading…" : `${time} ${cut}`.trim());
  column.note.classList.toggle("error", Boolean(error));
}
