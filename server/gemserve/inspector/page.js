// What the parts of the page share: its elements, its state, and how it says something.

export const $ = (id) => document.getElementById(id);

/**
 * `entry`: the question that is shown. `view`: what is shown as kept. `abort`: of a request.
 * `budget`: that of the slider, null while it stands where the answer's own was. `chosenHeads`:
 * those that are ticked, null if they are the filter's.
 */
export const state = {
  entries: [],
  cards: new Map(),
  entry: null,
  view: null,
  wanted: "",
  hits: [],
  hit: -1,
  abort: null,
  budget: null,
  chosenHeads: null,
};

export function say(id, message) {
  if ($(id).textContent !== message) $(id).textContent = message;
}
