// How strongly each token of a prompt is coloured, 0 to 1, from the scores of a reply.

const FRAME = 4; // protected ranges up to this priority are the question and what frames a message

export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** The heat of the filter's own choice: null if it was not made by scores of passages. */
export function heatOf(scores) {
  if (!scores?.inputs) return null;
  const heat = ofTokens(new Float32Array(bytesOf(scores.tokens).buffer), scores.inputs.protected);
  for (const [start, stop, strength] of scores.passages) heat.fill(strength / 255, start, stop);
  return heat;
}

/** The heat of some of the heads: of a passage, the largest of its tokens. null without heads. */
export function heatOfHeads({ passages, inputs }, heads) {
  if (!heads.length) return null;
  const most = new Float32Array(heads[0].bytes.length);
  for (const { bytes } of heads) {
    for (let i = 0; i < most.length; i++) most[i] = Math.max(most[i], bytes[i] ** 2);
  }
  const heat = ofTokens(most, inputs.protected);
  for (const [start, stop] of passages) {
    heat.fill(heat.subarray(start, stop).reduce((a, b) => Math.max(a, b), 0), start, stop);
  }
  return heat;
}

/** Shares of the best score; the root leaves small differences visible. */
function ofTokens(scores, protectedRanges) {
  const heat = scores.slice();
  for (const [start, stop, priority] of protectedRanges) {
    if (priority <= FRAME) heat.fill(0, start, stop); // a question's words attend to each other
  }
  const best = heat.reduce((a, b) => Math.max(a, b), 0);
  return heat.map((score) => Math.sqrt(Math.max(0, score) / (best || 1)));
}
