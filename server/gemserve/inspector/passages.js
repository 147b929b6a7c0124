// Cuts a prompt into passages, which are kept or dropped as a whole, as filtering/passages.py does.

const SHORTEST = 24; // a paragraph of fewer tokens joins the next one

function pieces(start, stop, breaks) {
  const edges = [start];
  let low = 0;
  let high = breaks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (breaks[middle] <= start) low = middle + 1;
    else high = middle;
  }
  for (let i = low; i < breaks.length && breaks[i] < stop; i++) edges.push(breaks[i]);
  edges.push(stop);
  return edges.slice(1).map((edge, i) => [edges[i], edge]);
}

function joinShort(all, limit) {
  const joined = [];
  for (const [start, stop] of all) {
    const before = joined.length ? joined[joined.length - 1] : [start, start + limit];
    if (before[1] - before[0] < SHORTEST && stop - before[0] <= limit) {
      joined[joined.length - 1] = [before[0], stop];
    } else {
      joined.push([start, stop]);
    }
  }
  return joined;
}

function split(start, stop, levels, limit, parts) {
  if (stop - start <= limit) {
    parts.push([start, stop]);
  } else if (levels.length) {
    let begin = start;
    let end = start;
    for (const [, pieceStop] of pieces(start, stop, levels[0])) {
      if (pieceStop - begin > limit && end > begin) {
        split(begin, end, levels.slice(1), limit, parts);
        begin = end;
      }
      end = pieceStop;
    }
    split(begin, end, levels.slice(1), limit, parts);
  }
}

/** The passages, as start and stop, that are kept or dropped as a whole. */
export function passagesOf(data, limit) {
  const numTokens = data.scores.length;
  const parts = [];
  for (const [start, stop] of joinShort(pieces(0, numTokens, data.paragraphs), limit)) {
    split(start, stop, [data.sentences, data.lines], limit, parts);
  }
  return parts;
}
