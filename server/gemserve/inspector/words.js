// Says in words what a filter did.

const whole = new Intl.NumberFormat("en");

export function count(number) {
  return whole.format(number);
}

export function seconds(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms >= 99_500) {
    const all = Math.round(ms / 1000);
    return `${Math.floor(all / 60)} min ${all % 60} s`;
  }
  return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
}

export function share(part, all) {
  const percent = (100 * part) / Math.max(1, all);
  return percent > 0 && percent < 1 ? "less than 1%" : `${Math.round(percent)}%`;
}

const WHY_WHOLE = {
  disabled: "No filter was used: the whole prompt was read.",
  short_prompt: "The prompt is short enough to be read whole, so nothing was dropped.",
  not_calibrated: "The model is not calibrated yet, so the whole prompt was read.",
  mostly_protected: "Most of the prompt is always read (instructions, tools, the question), so leaving out the rest saves nothing.",
  cached: "The prompt was read whole, because most of it had been read whole before, and that was less work than to filter it.",
  diffuse_attention: "Attention was diffuse, so the fallback read the whole prompt.",
  prompt_logprobs: "The whole prompt was read, because its tokens are scored.",
  error: "The filter failed, so the whole prompt was read.",
};

/** What was kept. `shown` is the choice of another budget, if it is not the one that was answered from. */
export function keptWords(report, shown) {
  const all = report.prompt_tokens;
  if (shown?.reason === "error") return WHY_WHOLE.error;
  if (shown) {
    const kept = `With a budget of ${count(shown.budget)} tokens, ${count(shown.count)} of ${count(all)} would be kept (${share(shown.count, all)})`;
    const by = shown.heads ? ", chosen by other heads than the filter’s" : "";
    return `${kept}${by}. The answer was given from ${count(report.kept_tokens)}.`;
  }
  if (!report.applied) return WHY_WHOLE[report.reason] ?? "The whole prompt was read.";
  const words = `${count(report.kept_tokens)} of ${count(all)} tokens were kept (${share(report.kept_tokens, all)}).`;
  if (report.reason !== "widened") return words;
  return `${words} Attention was diffuse, so the fallback kept as much as fits.`;
}

/** A budget, and whether other heads than the filter's choose: "300 tokens by other heads". */
export function choiceWords(budget, heads) {
  return `${count(budget)} tokens${heads ? " by other heads" : ""}`;
}

/** How long the first word took, against reading everything. */
function timeWords(entry) {
  if (entry.firstMs === null) return "";
  const first = `The first word came after ${seconds(entry.firstMs)}.`;
  const { report } = entry;
  if (!report.applied) return first;
  if (entry.other?.isWhole && entry.other.firstMs) {
    return `${first} With the whole prompt it came after ${seconds(entry.other.firstMs)} (measured).`;
  }
  if (entry.estimateMs === null) {
    return `${first} Most of the document was in the server's cache, so there is no estimate for reading everything.`;
  }
  return `${first} Reading everything would take about ${seconds(entry.estimateMs)} (estimate from the filter's own time).`;
}

/** What coverage says, and whether the choice was trusted. */
function coverageWords(report, bound) {
  if (report.coverage === null) return "";
  const told = `Coverage is ${report.coverage.toFixed(2)}: the best sixteenth of the document got ${Math.round(100 * report.coverage)}% of the question's attention.`;
  if (bound === null || bound === undefined) return told;
  const limit = bound.toFixed(2);
  if (report.reason === "diffuse_attention" || report.reason === "widened") {
    return `${told} That is below the bound of ${limit}, so the choice was not trusted.`;
  }
  if (report.coverage < bound) return `${told} That is below the bound of ${limit}; the fallback is off.`;
  return `${told} That is above the bound of ${limit}, so the choice was trusted.`;
}

/** What is said of the answer that was given, whatever else is shown. */
export function answerWords(entry) {
  const { report, scores } = entry;
  const coverage = coverageWords(report, scores?.inputs?.coverage_bound);
  return [timeWords(entry), coverage, cacheWords(report)];
}

function cacheWords(report) {
  if (report.windows) {
    const found = `${count(report.cached_windows)} of them were already in the document cache`;
    return `The documents were read in ${count(report.windows)} windows of at most ${count(report.window)} tokens; ${found}.`;
  }
  if (!report.cached_tokens) return "";
  return `${count(report.cached_tokens)} tokens were already in the document cache.`;
}

/** What went wrong, and what to do about it. */
export function errorWords(error) {
  if (error.status === 401) return `The server did not accept the API key: ${error.message}`;
  if (error.status === 429 || error.status === 503) {
    const when = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : " Try again later.";
    return `The server is busy: ${error.message}${when}`;
  }
  if (error.code === "context_length_exceeded") {
    return `${error.message} Shorten the document, or allow a shorter answer in the options.`;
  }
  return error.message;
}

/**
 * How long a document is, and what the model takes: `{text, isTooLong}`. `limit`: tokens of prompt and
 * answer. `longest`: of a prompt that is filtered.
 */
export function sizeWords(length, model, limit, longest) {
  if (!length) return { text: "", isTooLong: false };
  const tokens = Number((length / 4).toPrecision(2)); // in English; the server counts exactly
  const size = `${count(length)} characters, about ${count(tokens)} tokens`;
  if (!limit) return { text: size, isTooLong: false };
  const isTooLong = tokens > Math.max(limit, longest);
  const most = `${model} takes ${count(limit)} with the answer`;
  if (tokens > limit && !isTooLong) return { text: `${size}: it can be filtered, not read whole, ${most}.`, isTooLong };
  return { text: isTooLong ? `${size}: probably too long, ${most}.` : `${size}; ${most}.`, isTooLong };
}

/** Pairs of a layer and a head: "head 7 of layer 7 and heads 0, 3 of layer 8". */
export function headsWords(pairs) {
  const layers = new Map();
  for (const [layer, head] of pairs) layers.set(layer, [...(layers.get(layer) ?? []), head]);
  const parts = [...layers].map(
    ([layer, heads]) => `head${heads.length > 1 ? "s" : ""} ${heads.join(", ")} of layer ${layer}`,
  );
  return parts.join(" and ");
}
