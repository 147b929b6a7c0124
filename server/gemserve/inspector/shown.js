// Shows one question's prompt: what was kept, for the answer or for another budget.

import { keepOf, keptWith, LEAST } from "./asking.js";
import { Choices } from "./choices.js";
import { keptOf } from "./differences.js";
import { DocumentView } from "./document_view.js";
import { fateOf, findAll } from "./find.js";
import { offerHeads, pairsOf } from "./heads.js";
import { heatOfHeads } from "./heat.js";
import { $, say, state } from "./page.js";
import { Strip } from "./strip.js";
import * as words from "./words.js";

const SLOW_MS = 400; // a request that takes longer is spoken of
const FILTERED = [null, "widened", "diffuse_attention"]; // reasons of prompts that a filter looked at
const choices = new Choices(keptWith);
export const text = new DocumentView($("text"), showPlace);
const strip = new Strip($("strip"), (share) => {
  if (state.entry) text.scrollTo(Math.round(share * (state.entry.starts.length - 1)));
});

let onOpened = () => {};

/** `act` is called when another question is shown. */
export function whenOpened(act) {
  onOpened = act;
}

export function open(entry) {
  entry.isOpened = true;
  if (!entry.report) return;
  state.entry = entry;
  for (const [each, card] of state.cards) card.select(each === entry);
  $("shown").hidden = false;
  $("intro").hidden = $("sourced").hidden = true;
  text.open(entry.text, entry.starts);
  state.hits = [];
  $("find-words").value = "";
  state.view = null;
  state.chosenHeads = null;
  offerHeads(entry, showHeads);
  text.marked = [];
  const { method } = entry.report;
  for (const option of $("other").options) option.hidden = option.value === method;
  if ($("other").value === method) $("other").value = "none";
  showReply();
  $("leaned").hidden = true;
  onOpened();
  if (state.view.strength) text.scrollTo(best(state.view.strength));
  showPlace(...text.onScreen());
}

/** Show the selection that the answer was given from. */
export function showReply() {
  const { entry } = state;
  if (state.chosenHeads) {
    state.chosenHeads = null;
    offerHeads(entry, showHeads);
  }
  const { report } = entry;
  choices.cancel();
  expect(null);
  const kept = keptOf(report, entry.starts.length);
  show({ kept, count: report.kept_tokens, strength: heat(), isReply: true });
  setSlider(keepOf(report));
}

/** Ask the server what this budget and these heads keep, and show it; the text stays until then. */
async function showChoice() {
  const { entry, chosenHeads } = state;
  const budget = state.budget ?? Math.min(keepOf(entry.report), entry.starts.length - 1);
  const heads = pairsOf(chosenHeads);
  if (heads?.length === 0) return stay("No head is ticked, so none can choose.");
  expect(words.choiceWords(budget, heads));
  try {
    const report = await choices.wanted(entry, heads ? { keep: budget, heads } : { keep: budget });
    if (!report) return; // something else is wanted by now, and is being asked
    expect(null);
    const kept = keptOf(report, entry.starts.length);
    const { kept_tokens: count, reason } = report;
    const { strength } = state.view; // the colours of these heads are there already
    show({ kept, budget, heads, count, reason, strength, isReply: false });
  } catch (error) {
    stay(words.errorWords(error));
    $("budget-note").classList.add("error");
  }
}

/** Nothing is asked any more; say why, and what the text shows. */
function stay(why) {
  choices.cancel();
  expect(null);
  const { isReply, budget, heads } = state.view;
  const shown = isReply ? "what the answer was given from" : `a budget of ${words.choiceWords(budget, heads)}`;
  say("budget-note", `${why} The text still shows ${shown}.`);
}

let slow = 0; // a timer

/** The text is about to show this choice, in words; null: it shows what it should. */
function expect(choice) {
  clearTimeout(slow);
  $("text").setAttribute("aria-busy", String(choice !== null));
  $("budget-note").classList.remove("error");
  say("budget-note", "");
  if (choice === null) return;
  const note = `Asking the server what it would keep with ${choice}…`;
  slow = setTimeout(() => say("budget-note", note), SLOW_MS);
}

/** Colour by these heads at once, and ask what they keep; null: those that the filter uses. */
function showHeads(chosen) {
  state.chosenHeads = chosen;
  if (!chosen && state.budget === null) return showReply();
  show({ ...state.view, strength: heat() });
  showChoice();
}

function heat() {
  const { entry, chosenHeads } = state;
  return chosenHeads ? heatOfHeads(entry.scores, chosenHeads) : entry.heat;
}

export function show(given) {
  const view = { other: state.view?.other ?? null, ...given };
  state.view = view;
  text.show(view);
  strip.draw(view);
  showFacts();
  if (state.hit >= 0 && state.hits.length) showHitWords();
}

function best(strength) {
  let place = 0;
  for (let i = 1; i < strength.length; i++) if (strength[i] > strength[place]) place = i;
  return place;
}

export function showFacts() {
  const { entry, view } = state;
  const facts = [
    words.keptWords(entry.report, view.isReply ? null : view),
    state.chosenHeads ? "Colours and bars show the attention of other heads than the filter chose by." : "",
    view.reason === "diffuse_attention" || view.reason === "widened" ? "Attention is diffuse, so the fallback keeps more than the budget." : "",
    ...(view.isReply ? words.answerWords(entry) : []),
  ];
  const [kept, ...others] = facts.filter(Boolean);
  const first = document.createElement("strong");
  first.textContent = kept;
  $("facts").replaceChildren(first, ` ${others.join(" ")}`);
  $("whole").disabled = Boolean(state.abort) || !entry.report.applied;
}

function showPlace(first, last) {
  const n = Math.max(1, state.entry?.starts.length ?? 1);
  strip.frame(first / n, Math.max(first + 1, last) / n);
}

// ---- the budget: the slider's steps are even on a scale of logarithms

function budgetOf(step) {
  const n = state.entry.starts.length;
  return Math.round(LEAST * (n / LEAST) ** (step / 1000));
}

function setSlider(budget) {
  const n = state.entry.starts.length;
  state.budget = null;
  const isOff = !FILTERED.includes(state.entry.report.reason);
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

export function find(direction) {
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

export function nextKept() {
  const { kept } = state.view;
  let token = text.onScreen()[0] + 1;
  while (token < kept.length && kept[token]) token++;
  while (token < kept.length && !kept[token]) token++;
  text.scrollTo(token < kept.length ? token : 0);
}

export function describePlace(event) {
  const token = Number(event.target.dataset?.token ?? -1);
  if (token < 0) return;
  const { view } = state;
  const said = view.kept[token] ? "kept" : "dropped";
  const most = state.chosenHeads ? "of these heads' largest attention" : "of the best passage's rank";
  const rank = view.strength ? `, with ${Math.round(100 * view.strength[token] ** 2)}% ${most}` : "";
  $("passage").textContent = `Token ${words.count(token)}: ${said}${rank}.`;
}

/** The slider was moved. Its number changes at once. */
export function slide() {
  const budget = budgetOf(Number($("budget").value));
  state.budget = budget;
  sayBudget(budget);
  showChoice();
}

export function redraw() {
  strip.draw(state.view);
}
