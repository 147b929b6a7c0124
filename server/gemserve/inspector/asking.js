// Sends one question about a document, and collects what comes back.

import { startsInText } from "./document_view.js";
import { decodeHeads } from "./heads.js";
import { heatOf } from "./heat.js";
import { newEntry } from "./history.js";
import { getJson, postJson, streamChunks } from "./server.js";

const LAYERED = ["sieve", "gemfilter"]; // methods that choose by one layer
const PROTECTING = ["sieve", "position", "random"]; // whose `keep` is beside what is always read
export const LEAST = 16; // the smallest budget
const server = { hasTemplate: true, hasProgress: false, hasHeads: false, hasAttention: false };

/** Learn whether the model has a chat template, and whether the server reports its progress. */
export async function learnServer() {
  server.hasTemplate = Boolean((await getJson("tokenizer_info")).chat_template);
  const schemas = (await getJson("openapi.json")).components.schemas;
  server.hasProgress = "include_progress" in (schemas.StreamOptions?.properties ?? {});
  const options = schemas.AnswerFilterBody?.properties ?? {};
  server.hasAttention = "return_attention" in options;
  server.hasHeads = JSON.stringify(options.return_scores ?? "").includes('"heads"');
}

/** The question as an entry that is not answered yet. `earlier`: those before it. */
export function newQuestion(given, earlier) {
  const { model, question, keep, method, layer, window } = given;
  const filter = { method, return_selection: true };
  if (keep !== null && method !== "none") filter.keep = keep;
  if (LAYERED.includes(method)) filter.return_scores = method === "sieve" && server.hasHeads ? "heads" : true;
  if (server.hasAttention) filter.return_attention = true;
  if (layer !== null && LAYERED.includes(method)) filter.layer = layer;
  if (method === "sieve" && window !== null) filter.window = window;
  if (method === "sieve" && !given.fallback) filter.fallback = false;
  const before = earlier.find((each) => each.document === given.document && each.estimateMs);
  const entry = newEntry({ document: given.document, question, keep: filter.keep ?? null });
  entry.known = before?.estimateMs ?? null;
  entry.request = requestOf(given, { model, filter });
  return entry;
}

export function requestOf(given, { model, filter }) {
  const words = [given.document, given.question].filter(Boolean).join("\n\n");
  const body = {
    model,
    max_tokens: given.maxTokens,
    temperature: given.temperature,
    filter,
    document: given.document, // for programs: not sent
    question: given.question,
  };
  if (server.hasTemplate) body.messages = [{ role: "user", content: words }];
  else body.prompt = words;
  return { path: server.hasTemplate ? "v1/chat/completions" : "v1/completions", body };
}

/** The `keep` with which a method that always reads some tokens keeps as many in all. */
export function keepOf({ kept_tokens, protected_tokens }) {
  return Math.max(LEAST, kept_tokens - protected_tokens);
}

/** The same question, to be answered by another method from as many tokens, or from the whole. */
export function otherOf(entry, method) {
  const { path, body } = entry.request;
  const { report } = entry;
  const filter = { method };
  const keep = PROTECTING.includes(method) ? keepOf(report) : report.kept_tokens;
  if (method !== "none") Object.assign(filter, { keep, return_selection: true });
  if (LAYERED.includes(method) && body.filter.layer !== undefined) filter.layer = body.filter.layer;
  if (method === "sieve") filter.fallback = false;
  if (method === "sieve" && body.filter.window !== undefined) filter.window = body.filter.window;
  return newEntry({
    isWhole: method === "none",
    isOther: true,
    method,
    question: entry.question,
    document: entry.document,
    request: { path, body: { ...body, filter } },
  });
}

/** The `filter` object of a reply: what would be kept of an entry's prompt with other options. */
export async function keptWith(entry, options, signal) {
  const { model, messages, prompt, filter: answered } = entry.request.body;
  const { return_scores: _, return_attention: __, ...filter } = answered;
  const body = { model, messages, prompt, filter: { ...filter, ...options } };
  return (await postJson("v1/filter", body, signal)).filter;
}

/** Answer an entry; `update` is called whenever there is something new to show. */
export async function answer(entry, signal, update) {
  const { document: _, question: __, ...body } = entry.request.body;
  // first, because a key may be allowed one request at a time
  const tokenized = entry.isOther ? null : await tokenize(body, signal);
  if (server.hasProgress) body.stream_options = { include_progress: true };
  const startMs = performance.now();
  for await (const chunk of streamChunks(entry.request.path, body, signal)) {
    entry.progress = chunk.progress ?? null;
    if (chunk.filter && !entry.report) {
      const { scores, ...report } = chunk.filter;
      if (tokenized) Object.assign(entry, tokenized);
      entry.scores = scores;
      entry.heat = heatOf(scores);
      entry.heads = decodeHeads(scores);
      entry.report = report;
      entry.estimateMs = estimateOf(report, scores, entry.known);
    }
    const part = chunk.choices?.[0];
    const words = part?.delta?.content ?? part?.delta?.reasoning_content ?? part?.text ?? "";
    if (words && entry.firstMs === null) entry.firstMs = performance.now() - startMs;
    entry.answer += words;
    if (part?.finish_reason === "length") entry.isCut = true;
    if (part?.attention) entry.attention = part.attention;
    update();
  }
  entry.isRunning = false;
  update();
}

/** The prompt's text, and where in it each token begins. */
async function tokenize({ model, messages, prompt }, signal) {
  const asked = messages ? { messages } : { prompt };
  const reply = await postJson("tokenize", { model, ...asked, return_offsets: true }, signal);
  return { text: reply.text, starts: startsInText(reply.text, reply.offsets) };
}

/** How long reading everything would take; null if too little was read to tell. */
function estimateOf(report, scores, known) {
  if (!scores || report.cached_tokens > report.prompt_tokens / 2) return known;
  return report.filter_ms * scores.whole_ratio;
}
