// Shows a prompt's text: kept passages solid, dropped ones faded. Only what is near the screen has
// marks; the rest is plain text in blocks that the browser does not lay out.

const BLOCK_TOKENS = 160; // a block ends at the next line break behind so many tokens,
const LONG_BLOCK_TOKENS = 240; // or at the next end of a sentence behind so many,
const MOST_BLOCK_TOKENS = 400; // or at the next space
const LEVELS = 5;

/** Token starts in code points, as the server counts, as places in a JavaScript string. */
export function startsInText(text, offsets) {
  const starts = Uint32Array.from(offsets);
  if (!/[\ud800-\udbff]/.test(text)) return starts;
  let point = 0;
  let place = 0;
  for (let i = 0; i < starts.length; i++) {
    if (starts[i] < point) {
      starts[i] = place; // tokens that share a character
      continue;
    }
    for (; point < starts[i]; point++) place += text.codePointAt(place) > 0xffff ? 2 : 1;
    starts[i] = place;
  }
  return starts;
}

export class DocumentView {
  /** `onScroll` is called with the first and last token on the screen. */
  constructor(element, onScroll) {
    this.element = element;
    this.blocks = [];
    this.view = null;
    this.hit = null;
    this.marked = []; // ranges of tokens with an outline
    this.near = new Set();
    this.observer = new IntersectionObserver((entries) => this.observe(entries), {
      root: element,
      rootMargin: "600px 0px",
    });
    let isDue = false;
    element.addEventListener("scroll", () => {
      if (isDue) return;
      isDue = true;
      requestAnimationFrame(() => {
        isDue = false;
        onScroll(...this.onScreen());
      });
    });
  }

  observe(entries) {
    for (const entry of entries) {
      const block = this.blocks[entry.target.dataset.block];
      if (!block) continue;
      if (entry.isIntersecting) {
        this.near.add(block);
        this.mark(block);
      } else {
        this.near.delete(block);
      }
    }
  }

  /** Show another prompt: `text`, and where in it each token begins. */
  open(text, starts) {
    this.observer.disconnect();
    this.near.clear();
    this.text = text;
    this.starts = starts;
    this.view = null;
    this.hit = null;
    this.blocks = cut(text, starts);
    const parent = document.createDocumentFragment();
    this.blocks.forEach((block, index) => {
      block.element = document.createElement("div");
      block.element.className = "block";
      block.element.dataset.block = index;
      block.element.textContent = text.slice(block.low, block.high);
      parent.append(block.element);
    });
    this.element.replaceChildren(parent);
    this.element.scrollTop = 0;
    for (const block of this.blocks) this.observer.observe(block.element);
  }

  /** Show what is kept: `{kept, strength}` for each token; null shows plain text. */
  show(view) {
    this.view = view;
    for (const block of this.blocks) block.isMarked = false;
    for (const block of this.near) this.mark(block);
  }

  mark(block) {
    if (block.isMarked || !this.view) return;
    block.isMarked = true;
    const parts = document.createDocumentFragment();
    for (const run of this.runs(block)) {
      const part = document.createElement(run.isKept ? "mark" : "span");
      part.className = run.isHit ? `${run.style} hit` : run.style;
      part.dataset.token = run.token;
      part.textContent = this.text.slice(run.low, run.high);
      parts.append(part);
    }
    block.element.replaceChildren(parts);
  }

  /** Neighbouring tokens that look alike. */
  runs(block) {
    const { kept, strength, other } = this.view;
    const runs = [];
    const add = (low, high, token, isHit) => {
      if (low >= high) return;
      const level = strength ? Math.min(LEVELS, 1 + Math.floor(strength[token] * LEVELS)) : 3;
      let style = kept[token] ? `kept level${level}` : "gone";
      if (other && other[token] !== kept[token]) style += other[token] ? " only-other" : " only-this";
      if (this.marked.some(([start, stop]) => start <= token && token < stop)) style += " leaned";
      const last = runs.at(-1);
      if (last && last.style === style && last.isHit === isHit) last.high = high;
      else runs.push({ low, high, token, isHit, style, isKept: Boolean(kept[token]) });
    };
    for (let token = block.first; token < block.last; token++) {
      const low = Math.max(block.low, this.starts[token]);
      const high = token + 1 < this.starts.length ? this.starts[token + 1] : this.text.length;
      const [from, to] = this.hit ?? [high, high];
      const a = Math.min(high, Math.max(low, from));
      const b = Math.min(high, Math.max(low, to));
      add(low, a, token, false);
      add(a, b, token, true);
      add(b, high, token, false);
    }
    return runs;
  }

  /** Mark and show one hit of a search, as places in the text; null marks none. */
  showHit(hit) {
    this.hit = hit;
    for (const block of this.blocks) {
      const isHit = hit && hit[0] < block.high && hit[1] > block.low;
      if (block.hasHit || isHit) {
        block.hasHit = isHit;
        block.isMarked = false;
        if (isHit || this.near.has(block)) this.mark(block);
      }
    }
    if (!hit) return;
    const target = this.element.querySelector(".hit");
    target.parentElement.style.contentVisibility = "visible";
    this.center(target);
    requestAnimationFrame(() => this.center(target));
  }

  /** Scroll to a token. */
  scrollTo(token) {
    const block = this.blocks.find((each) => token < each.last) ?? this.blocks.at(-1);
    if (!block) return;
    block.element.style.contentVisibility = "visible"; // its height is a guess otherwise
    this.mark(block);
    const parts = [...block.element.children];
    const target = parts.findLast((part) => Number(part.dataset.token) <= token) ?? block.element;
    this.center(target);
    requestAnimationFrame(() => this.center(target)); // blocks above have their true heights now
  }

  center(target) {
    const box = this.element.getBoundingClientRect();
    const { top } = target.getBoundingClientRect();
    this.element.scrollTop += top - box.top - box.height / 3;
  }

  /** The first and last token on the screen. */
  onScreen() {
    const { top, bottom } = this.element.getBoundingClientRect();
    const first = this.blockAt(top);
    const last = this.blockAt(bottom);
    return first && last ? [tokenNear(first, top), tokenNear(last, bottom)] : [0, 0];
  }

  blockAt(y) {
    let low = 0;
    let high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.blocks[middle].element.getBoundingClientRect().bottom <= y) low = middle + 1;
      else high = middle;
    }
    return this.blocks[low];
  }
}

function tokenNear(block, y) {
  const box = block.element.getBoundingClientRect();
  const part = Math.min(1, Math.max(0, (y - box.top) / Math.max(1, box.height)));
  return Math.round(block.first + part * (block.last - block.first));
}

/** Blocks of whole lines, or of parts of very long ones. */
function cut(text, starts) {
  const blocks = [];
  const n = starts.length;
  let first = 0;
  const endOf = (token) => (token < n ? starts[token] : text.length);
  for (let token = 1; token <= n; token++) {
    const size = token - first;
    const isLineEnd = text[endOf(token) - 1] === "\n";
    const isSpace = text[endOf(token)] === " ";
    const isSentenceEnd = isSpace && ".!?".includes(text[endOf(token) - 1]);
    if (
      token === n ||
      (size >= BLOCK_TOKENS && isLineEnd) ||
      (size >= LONG_BLOCK_TOKENS && isSentenceEnd) ||
      (size >= MOST_BLOCK_TOKENS && (isSpace || size >= 2 * MOST_BLOCK_TOKENS))
    ) {
      const low = blocks.length ? starts[first] : 0;
      blocks.push({ first, last: token, low, high: endOf(token), isMarked: false });
      first = token;
    }
  }
  return blocks;
}
