// Shows one question's prompt: what was kept, for the answer or for another budget.

import { keptOf } from "./differences.js";
import { DocumentView } from "./document_view.js";
import { fateOf, findAll } from "./find.js";
import { dataOfHeads, offerHeads } from "./heads.js";
import { $, state } from "./page.js";
import { choose } from "./selection.js";
import { Strip } from "./strip.js";
import * as words from "./words.js";

const strengths = new WeakMap(); // by ranks, which several budgets share
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
  $("intro").hidden = true;
  text.open(entry.text, entry.starts);
  state.hits = [];
  $("find-words").value = "";
  state.view = null;
  state.chosenHeads = null;
  offerHeads(entry.heads, showHeads);
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
    offerHeads(entry.heads, showHeads);
  }
  const n = entry.starts.length;
  const { data, report } = entry;
  const kept = keptOf(report, n);
  const budget = Math.min(report.kept_tokens, n - 1);
  const made = data ? choose(data, budget, { budget, coverage: report.coverage }) : null;
  show({ kept, count: report.kept_tokens, strength: strengthOf(made?.ranks ?? null), isReply: true });
  setSlider(report.kept_tokens);
}

function showBudget(budget) {
  const { entry } = state;
  const { report } = entry;
  const asked = entry.keep ?? (report.reason === null ? report.kept_tokens : null);
  const isOthers = asked === null || state.chosenHeads;
  const known = isOthers ? null : { budget: asked, coverage: report.coverage };
  const data = state.chosenHeads ? state.headsData : entry.data;
  const chosen = choose(data, budget, known);
  show({ ...chosen, strength: strengthOf(chosen.ranks ?? null), isReply: false });
}

/** Redraw by these heads, with the budget that is shown; null: by those that the filter uses. */
function showHeads(chosen) {
  const { entry } = state;
  const budget = Math.min(state.view.count, entry.starts.length - 1);
  state.chosenHeads = chosen;
  state.headsData = chosen && dataOfHeads(entry.data, entry.heads, chosen);
  showBudget(budget);
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

/** Shares of the best rank, 0 to 1; the root leaves small differences visible. */
function strengthOf(ranks) {
  if (!ranks) return null;
  if (strengths.has(ranks)) return strengths.get(ranks);
  let best = 0;
  for (const rank of ranks) if (rank > best) best = rank;
  const found = ranks.map((rank) => Math.sqrt(Math.max(0, rank) / (best || 1)));
  strengths.set(ranks, found);
  return found;
}

export function showFacts() {
  const { entry, view } = state;
  const facts = [
    words.keptWords(entry.report, view.isReply ? null : view),
    state.chosenHeads ? "It is chosen by other heads than the filter's, from scores rounded to a byte." : "",
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
  const rank = view.strength ? `, with ${Math.round(100 * view.strength[token] ** 2)}% of the best passage's rank` : "";
  $("passage").textContent = `Token ${words.count(token)}: ${said}${rank}.`;
}

/** The slider was moved. */
export function slide() {
  const budget = budgetOf(Number($("budget").value));
  sayBudget(budget);
  showBudget(budget);
}

export function redraw() {
  strip.draw(state.view);
}
