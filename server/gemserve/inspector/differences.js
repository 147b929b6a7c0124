// What two answers to one question were given from: passages that both kept, and that one kept.

const MOST_SHOWN = 40; // of each kind

/** Whether each token was kept: of a report, which may have kept all. */
export function keptOf(report, numTokens) {
  const kept = new Uint8Array(numTokens);
  for (const [start, stop] of report.selection ?? [[0, numTokens]]) kept.fill(1, start, stop);
  return kept;
}

/** `{both, first, second}`: each has `tokens`, a count, and `passages`, as start and stop. */
export function differencesOf(first, second) {
  const kinds = { both: newKind(), first: newKind(), second: newKind() };
  const kindAt = (i) => (first[i] ? (second[i] ? "both" : "first") : second[i] ? "second" : null);
  for (let i = 0; i < first.length; ) {
    const kind = kindAt(i);
    const start = i;
    while (i < first.length && kindAt(i) === kind) i++;
    if (!kind) continue;
    kinds[kind].tokens += i - start;
    kinds[kind].count++;
    if (kinds[kind].passages.length < MOST_SHOWN) kinds[kind].passages.push([start, i]);
  }
  return kinds;
}

function newKind() {
  return { tokens: 0, count: 0, passages: [] };
}
