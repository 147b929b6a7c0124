// A choice of layers and heads: redraws from the scores of single heads, which the reply has.

import { $ } from "./page.js";
import { bytesOf } from "./selection.js";

/** The heads of a reply: `{layer, head, counts, bytes}`, and the highest of their scores. */
export function decodeHeads(scores) {
  const heads = (scores?.heads ?? []).map(({ tokens, ...head }) => ({ ...head, bytes: bytesOf(tokens) }));
  return { heads, high: scores?.heads_high ?? 0 };
}

/** Show a box for each head; `onChange` is called with the chosen ones, null for the filter's. */
export function offerHeads(known, onChange) {
  const heads = known?.heads ?? [];
  $("heads").hidden = heads.length < 2;
  const boxes = heads.map((head) => {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = head.counts;
    box.addEventListener("change", change);
    return box;
  });
  function change() {
    const chosen = heads.filter((_, i) => boxes[i].checked);
    const isFilters = heads.every((head, i) => head.counts === boxes[i].checked);
    onChange(isFilters ? null : chosen);
  }
  const groups = [...new Set(heads.map(({ layer }) => layer))].map((layer) => {
    const group = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = `Layer ${layer}`;
    group.append(legend);
    heads.forEach((head, i) => {
      if (head.layer !== layer) return;
      const label = document.createElement("label");
      label.append(boxes[i], ` ${head.head}${head.counts ? " (counts)" : ""}`);
      group.append(label);
    });
    return group;
  });
  $("head-boxes").replaceChildren(...groups);
  $("heads-back").onclick = () => {
    boxes.forEach((box, i) => (box.checked = heads[i].counts));
    onChange(null);
  };
}

/** What `choose` needs, with the scores of these heads alone; they are rounded to a byte. */
export function dataOfHeads(data, { high }, chosen) {
  const scores = new Float32Array(data.scores.length);
  const most = new Uint8Array(scores.length);
  for (const { bytes } of chosen) {
    for (let i = 0; i < most.length; i++) if (bytes[i] > most[i]) most[i] = bytes[i];
  }
  for (let i = 1; i < scores.length; i++) scores[i] = high * (most[i] / 255) ** 2;
  return { ...data, scores, rankable: undefined };
}
