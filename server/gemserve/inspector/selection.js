// Chooses tokens from a reply's scores, for any budget, exactly as the server does.
//
// It follows filtering/sieve.py, filtering/passages.py and filtering/protected_budget.py step by
// step, in the same float32 arithmetic. tests/unit/test_inspector_selection.py compares the two.

import { passagesOf } from "./passages.js";

const NUM_PEAKS = 3; // a passage ranks by the mean of this many highest scores
const REACH = 8; // neighbours on either side that count where the text has no breaks
const PASSAGE_SHARE = 1 / 4;
const SHORTEST_LIMIT = 32;
const LONGEST_LIMIT = 128;
const COVERAGE_SHARE = 1 / 16;
const AWAKE = 0.1;
const QUESTION = 1; // priorities of protected ranges
const FRAME = 4;
const HEAD = 6;
const TAIL = 7;

export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** A reply's `filter.scores`, decoded; null if they are not exact scores of sieve. */
export function decodeScores(scores) {
  if (!scores || scores.dtype !== "float32" || !scores.inputs) return null;
  const inputs = scores.inputs;
  return {
    scores: new Float32Array(bytesOf(scores.tokens).buffer),
    protected: inputs.protected,
    paragraphs: new Uint32Array(bytesOf(inputs.paragraphs).buffer),
    sentences: new Uint32Array(bytesOf(inputs.sentences).buffer),
    lines: new Uint32Array(bytesOf(inputs.lines).buffer),
    coverageBound: inputs.coverage_bound,
    fallback: inputs.fallback,
    limit: inputs.limit,
  };
}

/** Python's round: halves go to the even neighbour. */
function roundHalfEven(value) {
  const low = Math.floor(value);
  const rest = value - low;
  if (rest !== 0.5) return Math.round(value);
  return low % 2 === 0 ? low : low + 1;
}

/** Positions to keep whatever the scores are, at most `budget`, most important first. */
function protectedPositions(ranges, numTokens, budget) {
  const chosen = new Set();
  const sorted = [...ranges].sort((a, b) => a[2] - b[2] || b[0] - a[0]);
  for (const [start, stop, priority] of sorted) {
    const low = Math.max(0, start);
    const high = Math.min(stop, numTokens);
    for (let i = 0; i < high - low; i++) {
      if (chosen.size === budget) return [...chosen];
      chosen.add(priority === HEAD ? low + i : high - 1 - i);
    }
  }
  return [...chosen];
}

/** Positions kept before any is chosen: the question and the frame (`firm`), then the rest. */
export function reserve(ranges, numTokens, budget) {
  let chosen = [];
  let firm = 0;
  const limits = [
    [QUESTION, budget],
    [FRAME, Math.trunc(0.75 * budget)],
    [TAIL, Math.trunc(0.25 * budget)],
  ];
  for (const [last, limit] of limits) {
    const allowed = ranges.filter((range) => range[2] <= last);
    chosen = protectedPositions(allowed, numTokens, Math.max(chosen.length, limit));
    if (last === FRAME) firm = chosen.length;
  }
  return { positions: chosen, firm: chosen.slice(0, firm) };
}

/** The best score within REACH tokens of each token. */
function bestNear(scores) {
  const n = scores.length;
  const near = new Float32Array(n);
  const queue = new Int32Array(n); // positions whose scores fall
  let head = 0;
  let tail = 0;
  for (let i = 0, next = 0; i < n; i++) {
    for (; next < Math.min(n, i + REACH + 1); next++) {
      while (tail > head && scores[queue[tail - 1]] <= scores[next]) tail--;
      queue[tail++] = next;
    }
    while (queue[head] < i - REACH) head++;
    near[i] = scores[queue[head]];
  }
  return near;
}

/** The mean of the three highest scores of start..stop−1, in float32. */
function passageRank(scores, start, stop) {
  let a = -Infinity;
  let b = -Infinity;
  let c = -Infinity;
  for (let i = start; i < stop; i++) {
    const score = scores[i];
    if (score > a) [a, b, c] = [score, a, b];
    else if (score > b) [b, c] = [score, b];
    else if (score > c) c = score;
  }
  const peaks = [a, b, c].slice(0, Math.min(NUM_PEAKS, stop - start));
  let total = 0;
  for (const peak of peaks) total = Math.fround(total + peak);
  return Math.fround(total / peaks.length);
}

/** The scores without those of `firm`, and the best ones near; computed once for each `firm`. */
function rankable(data, firm) {
  const known = data.rankable;
  if (known?.firm.length === firm.length && firm.every((p, i) => p === known.firm[i])) return known;
  const scores = data.scores.slice();
  for (const position of firm) scores[position] = 0;
  data.rankable = { firm, scores, near: bestNear(scores), ranks: new Map() };
  return data.rankable;
}

const MOST_RANKS = 8; // half a megabyte each for 128K tokens

function ranksOf(data, { scores, near, ranks: known }, room) {
  const limit = roundHalfEven(Math.min(Math.max(PASSAGE_SHARE * room, SHORTEST_LIMIT), LONGEST_LIMIT));
  if (known.has(limit)) return known.get(limit);
  if (known.size === MOST_RANKS) known.clear();
  const ranks = near.slice();
  for (const [start, stop] of passagesOf(data, limit)) {
    ranks.fill(passageRank(scores, start, stop), start, stop);
  }
  known.set(limit, ranks);
  return ranks;
}

/**
 * The `count`-th largest of the values whose `isOut` is 0, none of them negative.
 *
 * The bits of such float32 numbers are in the order of the numbers, so two counts of half of the
 * bits find it, where sorting 128K numbers would take too long for a slider.
 */
function nthLargest(values, isOut, count) {
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  const descend = (bins, left) => {
    let bin = bins.length - 1;
    for (; bins[bin] < left; bin--) left -= bins[bin];
    return [bin, left];
  };
  const bins = new Uint32Array(1 << 16);
  for (let i = 0; i < bits.length; i++) if (!isOut[i]) bins[bits[i] >>> 16]++;
  const [upper, left] = descend(bins, count);
  bins.fill(0);
  for (let i = 0; i < bits.length; i++) {
    if (!isOut[i] && bits[i] >>> 16 === upper) bins[bits[i] & 0xffff]++;
  }
  const [lower, equal] = descend(bins, left);
  const found = new Float32Array(new Uint32Array([upper * 65536 + lower]).buffer)[0];
  return { found, equal }; // `equal`: how many of those that equal it are among the `count`
}

function coverageOf(scores, near, firm) {
  const isOutside = new Uint8Array(scores.length);
  for (const position of firm) isOutside[position] = 1;
  const count = Math.max(1, roundHalfEven(COVERAGE_SHARE * (scores.length - firm.length)));
  const { found: cut, equal } = nthLargest(near, isOutside, count);
  let atCut = equal;
  let best = 0;
  let total = 0;
  for (let i = 0; i < scores.length; i++) {
    if (isOutside[i]) continue;
    total += scores[i];
    if (near[i] > cut || (near[i] === cut && atCut-- > 0)) best += scores[i];
  }
  return Math.round((best / Math.max(total, AWAKE)) * 1e4) / 1e4;
}

/**
 * What a request with `keep: budget` keeps: `{kept: Uint8Array, count, strength, coverage, reason}`.
 *
 * `known`: coverage of a choice that was made with `known.budget`, by the server.
 */
export function choose(data, budget, known = null) {
  const numTokens = data.scores.length;
  const kept = new Uint8Array(numTokens);
  if (budget >= numTokens) {
    return { kept: kept.fill(1), count: numTokens, coverage: null, reason: "short_prompt" };
  }
  const reserved = reserve(data.protected, numTokens, budget);
  const room = budget - reserved.positions.length;
  const base = rankable(data, reserved.firm);
  const { scores, near } = base;
  const ranks = ranksOf(data, base, room);
  for (const position of reserved.positions) kept[position] = 1;
  let coverage = 0;
  if (room > 0) {
    const same = known && reserve(data.protected, numTokens, known.budget).firm.length;
    coverage = same === reserved.firm.length ? known.coverage : coverageOf(scores, near, reserved.firm);
  }
  const isDiffuse = data.fallback && coverage < data.coverageBound && data.limit > budget;
  const count = isDiffuse ? Math.min(data.limit, numTokens) : budget;
  let reason = null;
  if (isDiffuse) reason = count === numTokens ? "diffuse_attention" : "widened";
  take(kept, count - reserved.positions.length, ranks, near, scores);
  return { kept, count, ranks, coverage, reason };
}

/** Mark the best `count` positions that are not kept yet. */
function take(kept, count, ranks, near, scores) {
  if (count <= 0) return;
  let numFree = 0;
  for (let i = 0; i < kept.length; i++) numFree += 1 - kept[i];
  if (count >= numFree) {
    kept.fill(1);
    return;
  }
  // most tokens rank far above or below the cut: only those at the cut are put in order
  const { found: cut } = nthLargest(ranks, kept, count);
  const atCut = [];
  let left = count;
  for (let i = 0; i < kept.length; i++) {
    if (kept[i] || ranks[i] < cut) continue;
    if (ranks[i] === cut) {
      atCut.push(i);
    } else {
      kept[i] = 1;
      left--;
    }
  }
  atCut.sort((i, j) => near[j] - near[i] || scores[j] - scores[i] || i - j);
  for (const i of atCut.slice(0, left)) kept[i] = 1;
}

/** Half-open ranges of the positions that are kept. */
export function rangesOf(kept) {
  const ranges = [];
  for (let i = 0; i < kept.length; i++) {
    if (!kept[i]) continue;
    const start = i;
    while (i < kept.length && kept[i]) i++;
    ranges.push([start, i]);
  }
  return ranges;
}
