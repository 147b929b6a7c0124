// The questions that were asked about the document, with their answers.

import { seconds } from "./words.js";

/** One question. `whole`: the answer from the whole prompt, if it was asked for, too. */
export function newEntry(fields) {
  return {
    text: "", // of the prompt, as it was tokenized
    starts: new Uint32Array(0),
    answer: "",
    report: null,
    data: null, // decoded scores
    firstMs: null,
    estimateMs: null,
    error: "",
    isRunning: true,
    whole: null,
    ...fields,
  };
}

/** A card that shows an entry; `onOpen` is called when it is chosen. */
export class Card {
  constructor(entry, onOpen) {
    this.entry = entry;
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
    this.whole = null;
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
    fill(this.answer, entry);
    if (entry.whole) {
      this.whole ??= this.column("Answer from the whole prompt");
      this.answers.classList.add("beside");
      fill(this.whole, entry.whole);
    }
  }

  select(isSelected) {
    this.element.classList.toggle("selected", isSelected);
    if (isSelected) this.title.setAttribute("aria-current", "true");
    else this.title.removeAttribute("aria-current");
  }
}

function fill(column, { answer, isRunning, error, firstMs }) {
  column.text.textContent = answer;
  column.text.classList.toggle("running", isRunning);
  const time = firstMs === null ? "" : `First word after ${seconds(firstMs)}.`;
  column.note.textContent = error || (isRunning && !answer ? "Reading…" : time);
  column.note.classList.toggle("error", Boolean(error));
}
