// Says in words what a filter did.

const whole = new Intl.NumberFormat("en");

export function count(number) {
  return whole.format(number);
}

export function seconds(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
}

export function share(part, all) {
  const percent = (100 * part) / Math.max(1, all);
  return percent > 0 && percent < 1 ? "less than 1%" : `${Math.round(percent)}%`;
}

const WHY_WHOLE = {
  disabled: "No filter was used: the whole prompt was read.",
  short_prompt: "The prompt is short enough to be read whole, so nothing was dropped.",
  diffuse_attention: "Attention was diffuse, so the fallback read the whole prompt.",
  prompt_logprobs: "The whole prompt was read, because its tokens are scored.",
  error: "The filter failed, so the whole prompt was read.",
};

/** What was kept. `shown` is the slider's choice, if it is not the one that was answered from. */
export function keptWords(report, shown) {
  const all = report.prompt_tokens;
  if (shown) {
    return `With this budget ${count(shown.count)} of ${count(all)} tokens would be kept (${share(shown.count, all)}). The answer was given from ${count(report.kept_tokens)}.`;
  }
  if (!report.applied) return WHY_WHOLE[report.reason] ?? "The whole prompt was read.";
  const words = `${count(report.kept_tokens)} of ${count(all)} tokens were kept (${share(report.kept_tokens, all)}).`;
  if (report.reason !== "widened") return words;
  return `${words} Attention was diffuse, so the fallback kept as much as fits.`;
}

/** How long the first word took, against reading everything. */
export function timeWords(entry) {
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
export function coverageWords(report, bound) {
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

export function cacheWords(report) {
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
  return error.message;
}
