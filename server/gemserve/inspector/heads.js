// Boxes for layers and heads, whose scores a reply has.

import { $ } from "./page.js";
import { bytesOf } from "./heat.js";

/** The heads of a reply: `{layer, head, counts, bytes}`. */
export function decodeHeads(scores) {
  return (scores?.heads ?? []).map(({ tokens, ...head }) => ({ ...head, bytes: bytesOf(tokens) }));
}

/** Heads as the option `heads` of a request names them; null stays null. */
export function pairsOf(heads) {
  return heads?.map(({ layer, head }) => [layer, head]) ?? null;
}

/**
 * Show a box for each head of an entry; `onChange` is called with the chosen ones, null for the
 * filter's. A prompt that was read in windows has no scores of single heads: the page says so.
 */
export function offerHeads({ heads, report }, onChange) {
  const hasWindows = Boolean(report.windows);
  $("heads").hidden = heads.length < 2 && !hasWindows;
  $("heads-windows").hidden = !hasWindows;
  $("heads-hint").hidden = $("heads-back").hidden = hasWindows;
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
