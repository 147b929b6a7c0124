// Which kept passages a sentence of the answer leaned on, from the reply's `attention`.

const MOST_SHOWN = 5;

/** The sentences of an answer, as start and stop. */
export function sentencesOf(answer) {
  const cutter = new Intl.Segmenter("en", { granularity: "sentence" });
  return [...cutter.segment(answer)].map(({ index, segment }) => [index, index + segment.length]);
}

/** `offsets` count characters; a JavaScript string counts some of these twice. */
function places(answer, offsets) {
  const starts = [0];
  for (const character of answer) starts.push(starts.at(-1) + character.length);
  return offsets.map((offset) => starts[Math.min(offset, starts.length - 1)]);
}

/** The strongest passages of a part of the answer: `{start, stop, share}`, best first. */
export function leanedOn(attention, answer, [low, high]) {
  const totals = new Map();
  const at = places(answer, attention.offsets);
  let count = 0;
  attention.tokens.forEach((passages, token) => {
    if (at[token] < low || at[token] >= high) return;
    count++;
    for (const [index, weight] of passages) totals.set(index, (totals.get(index) ?? 0) + weight);
  });
  const ranked = [...totals].sort((a, b) => b[1] - a[1]).slice(0, MOST_SHOWN);
  return ranked.map(([index, total]) => {
    const [start, stop] = attention.passages[index];
    return { start, stop, share: total / count };
  });
}
