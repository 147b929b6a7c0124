// Finds words in the prompt, and says whether each hit was kept.

const MOST_HITS = 5000;

/** Where `words` stand in `text`, without regard to case: starts of at most MOST_HITS hits. */
export function findAll(text, words) {
  const hits = [];
  if (!words) return hits;
  const pattern = new RegExp(words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
  for (const match of text.matchAll(pattern)) {
    hits.push([match.index, match.index + match[0].length]);
    if (hits.length === MOST_HITS) break;
  }
  return hits;
}

/** The last index whose start is at or before `place`. */
export function tokenAt(starts, place) {
  let low = 0;
  let high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= place) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** "kept", "dropped" or "partly kept": the tokens of the hit. */
export function fateOf([low, high], starts, kept) {
  const first = tokenAt(starts, low);
  const last = tokenAt(starts, high - 1);
  let numKept = 0;
  for (let i = first; i <= last; i++) numKept += kept[i];
  if (numKept === 0) return "dropped";
  return numKept === last - first + 1 ? "kept" : "partly kept";
}
