// The inspector page: asks a question about a document, and shows what the filter kept.

import * as asking from "./asking.js";
import { hideLeaning, showDifferences, showLeaning } from "./comparing.js";
import * as programs from "./export.js";
import { textOf } from "./files.js";
import { Card } from "./history.js";
import * as libraries from "./libraries.js";
import { $, say, state } from "./page.js";
import { getJson, keepKey, readKey } from "./server.js";
import { describePlace, find, nextKept, open, redraw, showFacts, showReply, slide } from "./shown.js";
import * as words from "./words.js";

// ---- asking

let limits = new Map(); // of each model: tokens of prompt and answer
let longest = 0; // tokens of a prompt that is filtered
let sizeNote = "";
let learning = Promise.resolve(); // of what the server can do; questions wait for it

async function connect() {
  say("error", "");
  try {
    const models = (await getJson("v1/models")).data;
    $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    limits = new Map(models.map(({ id, max_model_len }) => [id, max_model_len]));
    const info = await getJson("server_info");
    longest = info.engine.max_prompt_tokens ?? 0;
    showSize();
    learning = asking.learnServer();
    await learning;
    await libraries.connect(info.has_libraries);
    $("access").open = false;
  } catch (error) {
    if (error.status === 401) $("access").open = true;
    const needsKey = error.status === 401 && !readKey();
    say("error", needsKey ? "This server needs an API key." : words.errorWords(error));
    if (error.status === 401) $("key").focus();
  }
}

function settings() {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const window = $("window").value.trim();
  return {
    model: $("model").value,
    document: $("document").value,
    question: $("question").value.trim(),
    method: $("method").value,
    keep: number("keep"),
    layer: number("layer"),
    window: /^[0-9]+$/.test(window) ? Number(window) : window || null,
    fallback: $("fallback").checked,
    maxTokens: number("max-tokens") ?? 128,
    temperature: number("temperature") ?? 0,
  };
}

async function ask() {
  if ($("send").disabled) return; // one request at a time, however it is asked for
  const given = settings();
  say("error", "");
  if (!given.model) return connect();
  const library = $("library").value;
  if (library && given.question) return askLibrary(library, given);
  if (!library && !given.document.trim()) return complain("document", "There is no document yet.");
  if (!given.question) return complain("question", "There is no question yet.");
  $("send").disabled = true;
  await learning.catch(() => {}); // `connect` has said what went wrong
  const entry = asking.newQuestion(given, state.entries);
  addCard(entry);
  await run(async (signal) => {
    await asking.answer(entry, signal, () => update(entry));
    if ($("compare").checked && entry.report?.applied) await askOther(entry, "none", signal);
  }, entry);
  $("question").select();
}

async function askLibrary(library, given) {
  $("send").disabled = true;
  await learning.catch(() => {}); // `connect` has said what went wrong
  state.abort = new AbortController();
  $("stop").disabled = false;
  say("status", "Searching the library…");
  try {
    await libraries.answer(library, given, state.abort.signal);
    say("status", "Done.");
  } catch (error) {
    fail({}, error);
  } finally {
    state.abort = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

async function askOther(entry, method, signal) {
  const other = asking.otherOf(entry, method);
  entry.other = other;
  await asking.answer(other, signal, () => update(entry));
  if (state.entry === entry) showDifferences();
}

/** Run one request at a time; its errors are shown in the entry and below the form. */
async function run(work, entry) {
  state.abort = new AbortController();
  $("send").disabled = $("whole").disabled = true;
  $("stop").disabled = false;
  say("status", "Reading the prompt…");
  try {
    await work(state.abort.signal);
    say("status", "Done.");
  } catch (error) {
    fail(entry, error);
  } finally {
    state.abort = null;
    $("send").disabled = false;
    $("stop").disabled = $("progress").hidden = true;
    update(entry);
  }
}

function fail(entry, error) {
  say("status", "");
  const isStopped = error.name === "AbortError";
  const told = isStopped ? "Stopped." : words.errorWords(error);
  for (const part of [entry.other, entry]) {
    if (!part?.isRunning) continue;
    part.isRunning = false;
    part.error = told;
  }
  if (isStopped) return;
  say("error", told);
  if (error.status === 401) {
    $("access").open = true;
    $("key").focus();
  }
}

function addCard(entry) {
  const card = new Card(entry, open, (...given) => showLeaning(...given, open));
  state.entries.push(entry);
  state.cards.set(entry, card);
  if (state.entries.length === 1) $("answers").replaceChildren();
  $("answers").prepend(card.element);
  $("ask").classList.add("asked");
}

function update(entry) {
  state.cards.get(entry).update();
  const { progress } = entry.other?.isRunning ? entry.other : entry;
  $("progress").hidden = !progress;
  if (progress) {
    $("progress").value = progress.total ? progress.tokens / progress.total : 0;
    const left = progress.eta_ms ? `, about ${words.seconds(progress.eta_ms)} left` : "";
    say("status", `Reading: ${words.count(progress.tokens)} of ${words.count(progress.total)} tokens${left}.`);
  } else if (entry.isRunning && entry.answer) {
    say("status", "Answering…");
  }
  if (entry.report && state.entry !== entry && !entry.isOpened) open(entry);
  else if (entry === state.entry) showFacts();
}

// ---- files, programs, keys

async function readFile(file) {
  if (!file) return;
  say("error", "");
  say("status", `Reading ${file.name}…`);
  try {
    const { text, note } = await textOf(file);
    $("document").value = text;
    showSize(note);
    say("status", "");
  } catch (error) {
    fail({}, error);
  }
}

/** `note`: what the document was read from; as before, if there is none. */
function showSize(note = sizeNote) {
  sizeNote = note;
  const model = $("model").value;
  const limit = limits.get(model);
  const { text, isTooLong } = words.sizeWords($("document").value.length, model, limit, longest);
  say("document-size", text && note ? `${note}: ${text}` : text);
  $("document-size").classList.toggle("error", isTooLong);
}

function showProgram(kind) {
  if (!kind || !state.entry) return;
  $("program-title").textContent = $("copy").selectedOptions[0].text;
  $("program-text").value = programs[kind](state.entry.request);
  $("program").showModal();
  $("program-text").setSelectionRange(0, 0);
  $("program-text").scrollTop = 0;
  $("copy").value = "";
}

async function copyProgram() {
  $("program-text").select();
  try {
    await navigator.clipboard.writeText($("program-text").value);
  } catch {
    document.execCommand("copy"); // without https there is no clipboard
  }
}

function complain(id, message) {
  say("error", message);
  $(id).focus();
}

// ---- events

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  const submit = (id, act) => on(id, "submit", (event) => (event.preventDefault(), act()));
  submit("ask-form", ask);
  submit("find-form", () => find(1));
  submit("key-form", () => (keepKey($("key").value.trim()), connect()));
  libraries.listen(on, submit);
  on("find-before", "click", () => find(-1));
  on("stop", "click", () => state.abort?.abort());
  on("question", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), $("ask-form").requestSubmit());
  });
  on("document", "input", () => showSize(""));
  on("model", "change", () => showSize());
  on("file", "change", (event) => readFile(event.target.files[0]));
  on("budget", "input", slide);
  on("budget-back", "click", showReply);
  on("next-kept", "click", nextKept);
  on("text", "click", describePlace);
  on("whole", "click", () => run((signal) => askOther(state.entry, $("other").value, signal), state.entry));
  on("leaned-close", "click", hideLeaning);
  on("differ", "change", showDifferences);
  on("copy", "change", (event) => showProgram(event.target.value));
  on("program-copy", "click", copyProgram);
  on("program-document", "click", () => {
    programs.save("document.txt", state.entry.request.body.document, "text/plain");
  });
  on("program-close", "click", () => $("program").close());
  on("save", "click", () => {
    programs.save("answer.html", programs.pageOf(state.entry, state.view), "text/html");
  });
  on("ask", "dragover", (event) => (event.preventDefault(), $("document").classList.add("dropping")));
  on("ask", "dragleave", () => $("document").classList.remove("dropping"));
  on("ask", "drop", (event) => {
    $("document").classList.remove("dropping");
    if (event.dataTransfer.files.length) (event.preventDefault(), readFile(event.dataTransfer.files[0]));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

listen();
$("key").value = readKey();
connect();
