// The inspector page: asks a question about a document, and shows what the filter kept.

import * as asking from "./asking.js";
import { DocumentView } from "./document_view.js";
import { fateOf, findAll } from "./find.js";
import { Card } from "./history.js";
import { choose } from "./selection.js";
import { Strip } from "./strip.js";
import * as programs from "./export.js";
import { getJson, keepKey, readKey } from "./server.js";
import * as words from "./words.js";

const $ = (id) => document.getElementById(id);
const state = { entries: [], cards: new Map(), entry: null, view: null, hits: [], hit: -1, abort: null };
const text = new DocumentView($("text"), showPlace);
const strip = new Strip($("strip"), (share) => {
  if (state.entry) text.scrollTo(Math.round(share * (state.entry.starts.length - 1)));
});

// ---- asking

async function connect() {
  say("error", "");
  try {
    const models = (await getJson("v1/models")).data;
    $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    await asking.learnServer();
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
  return {
    model: $("model").value,
    document: $("document").value,
    question: $("question").value.trim(),
    method: $("method").value,
    keep: number("keep"),
    fallback: $("fallback").checked,
    maxTokens: number("max-tokens") ?? 128,
    temperature: number("temperature") ?? 0,
  };
}

async function ask() {
  const given = settings();
  say("error", "");
  if (!given.model) return connect();
  if (!given.document.trim()) return complain("document", "There is no document yet.");
  if (!given.question) return complain("question", "There is no question yet.");
  const entry = asking.newQuestion(given, state.entries);
  addCard(entry);
  await run(async (signal) => {
    await asking.answer(entry, signal, () => update(entry));
    if ($("compare").checked && entry.report?.applied) await askWhole(entry, signal);
  }, entry);
  $("question").select();
}

async function askWhole(entry, signal) {
  const whole = asking.wholeOf(entry);
  entry.whole = whole;
  await asking.answer(whole, signal, () => update(entry));
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
  for (const part of [entry.whole, entry]) {
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
  const card = new Card(entry, open);
  state.entries.push(entry);
  state.cards.set(entry, card);
  if (state.entries.length === 1) $("answers").replaceChildren();
  $("answers").prepend(card.element);
}

function update(entry) {
  state.cards.get(entry).update();
  const { progress } = entry.whole?.isRunning ? entry.whole : entry;
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

// ---- showing

function open(entry) {
  entry.isOpened = true;
  if (!entry.report) return;
  state.entry = entry;
  for (const [each, card] of state.cards) card.select(each === entry);
  $("shown").hidden = false;
  text.open(entry.text, entry.starts);
  state.hits = [];
  $("find-words").value = "";
  showReply();
  const n = entry.starts.length;
  const first = state.view.kept.findIndex((_, i) => i > n / 50 && i < 0.98 * n && state.view.kept[i]);
  if (entry.report.applied && first > 0) text.scrollTo(Math.max(0, first - 40));
  showPlace(...text.onScreen());
}

/** Show the selection that the answer was given from. */
function showReply() {
  const { entry } = state;
  const n = entry.starts.length;
  const kept = new Uint8Array(n);
  for (const [start, stop] of entry.report.selection ?? [[0, n]]) kept.fill(1, start, stop);
  const { data, report } = entry;
  const made = data && report.applied ? choose(data, Math.min(report.kept_tokens, n - 1)) : null;
  show({ kept, count: report.kept_tokens, strength: strengthOf(made?.ranks ?? null), isReply: true });
  setSlider(report.kept_tokens);
}

function showBudget(budget) {
  const { entry } = state;
  const { report } = entry;
  const known = { budget: entry.keep ?? report.kept_tokens, coverage: report.coverage };
  const chosen = choose(entry.data, budget, entry.keep ? known : null);
  show({ ...chosen, strength: strengthOf(chosen.ranks ?? null), isReply: false });
}

function show(view) {
  state.view = view;
  text.show(view);
  strip.draw(view);
  showFacts();
  if (state.hit >= 0 && state.hits.length) showHitWords();
}

/** Shares of the best rank, 0 to 1; the root leaves small differences visible. */
function strengthOf(ranks) {
  if (!ranks) return null;
  let best = 0;
  for (const rank of ranks) if (rank > best) best = rank;
  return ranks.map((rank) => Math.sqrt(Math.max(0, rank) / (best || 1)));
}

function showFacts() {
  const { entry, view } = state;
  const facts = [
    words.keptWords(entry.report, view.isReply ? null : view),
    view.reason === "diffuse_attention" || view.reason === "widened" ? "With this budget the fallback would read more." : "",
    words.timeWords(entry),
    words.coverageWords(entry.report, entry.data?.coverageBound),
    words.cacheWords(entry.report),
  ];
  $("facts").textContent = facts.filter(Boolean).join(" ");
  $("whole").disabled = Boolean(state.abort) || Boolean(entry.whole) || !entry.report.applied;
}

function showPlace(first, last) {
  const n = Math.max(1, state.entry?.starts.length ?? 1);
  strip.frame(first / n, Math.max(first + 1, last) / n);
}

// ---- the budget: the slider's steps are even on a scale of logarithms

const LEAST = 16;

function budgetOf(step) {
  const n = state.entry.starts.length;
  return Math.round(LEAST * (n / LEAST) ** (step / 1000));
}

function setSlider(budget) {
  const n = state.entry.starts.length;
  const isOff = !state.entry.data;
  $("budget").disabled = $("budget-back").disabled = isOff;
  const step = (1000 * Math.log(Math.max(LEAST, budget) / LEAST)) / Math.log(Math.max(LEAST + 1, n) / LEAST);
  $("budget").value = Math.round(step);
  sayBudget(isOff ? null : budget);
}

function sayBudget(budget) {
  const said = budget === null ? "not for this answer" : `${words.count(budget)} tokens`;
  $("budget-words").value = said;
  $("budget").setAttribute("aria-valuetext", said);
}

// ---- finding

function find(direction) {
  if (!state.entry) return;
  const wanted = $("find").value;
  if (wanted !== state.wanted || !state.hits.length) {
    state.wanted = wanted;
    state.hits = findAll(state.entry.text, wanted);
    state.hit = direction > 0 ? -1 : 0;
  }
  const { hits } = state;
  if (!hits.length) {
    text.showHit(null);
    $("find-words").value = wanted ? "not found" : "";
    return;
  }
  state.hit = (state.hit + direction + hits.length) % hits.length;
  text.showHit(hits[state.hit]);
  showHitWords();
}

function showHitWords() {
  const { hits, hit, entry, view } = state;
  const fate = fateOf(hits[hit], entry.starts, view.kept);
  const numKept = hits.filter((each) => fateOf(each, entry.starts, view.kept) === "kept").length;
  $("find-words").value = `${hit + 1} of ${hits.length}: ${fate} (${numKept} kept in all)`;
}

function nextKept() {
  const { kept } = state.view;
  let token = text.onScreen()[0] + 1;
  while (token < kept.length && kept[token]) token++;
  while (token < kept.length && !kept[token]) token++;
  text.scrollTo(token < kept.length ? token : 0);
}

function describePlace(event) {
  const token = Number(event.target.dataset?.token ?? -1);
  if (token < 0) return;
  const { view } = state;
  const said = view.kept[token] ? "kept" : "dropped";
  const rank = view.strength ? `, with ${Math.round(100 * view.strength[token] ** 2)}% of the best passage's rank` : "";
  $("passage").textContent = `Token ${words.count(token)}: ${said}${rank}.`;
}

// ---- files, programs, keys

async function readFile(file) {
  if (!file) return;
  const content = await file.text();
  if (/\u0000|^%PDF/.test(content.slice(0, 4096))) {
    say("error", `${file.name} is not plain text. Convert it to text first.`);
    return;
  }
  $("document").value = content;
  showSize();
}

function showSize() {
  const { length } = $("document").value;
  $("document-size").textContent = length ? `${words.count(length)} characters, about ${words.count(Math.round(length / 4))} tokens` : "";
}

function showProgram(kind) {
  if (!kind || !state.entry) return;
  $("program-title").textContent = $("copy").selectedOptions[0].text;
  $("program-text").value = programs[kind](state.entry.request);
  $("program").showModal();
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

function say(id, message) {
  if ($(id).textContent !== message) $(id).textContent = message;
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
  on("find-before", "click", () => find(-1));
  on("stop", "click", () => state.abort?.abort());
  on("question", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) (event.preventDefault(), $("ask-form").requestSubmit());
  });
  on("document", "input", showSize);
  on("file", "change", (event) => readFile(event.target.files[0]));
  on("budget", "input", (event) => {
    const budget = budgetOf(Number(event.target.value));
    sayBudget(budget);
    showBudget(budget);
  });
  on("budget-back", "click", showReply);
  on("next-kept", "click", nextKept);
  on("text", "click", describePlace);
  on("whole", "click", () => run((signal) => askWhole(state.entry, signal), state.entry));
  on("copy", "change", (event) => showProgram(event.target.value));
  on("program-copy", "click", copyProgram);
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => strip.draw(state.view));
}

listen();
$("key").value = readKey();
connect();
