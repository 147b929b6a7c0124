// A strip that shows the whole prompt: what was kept, and how strong attention was.

/** Draw `view` (kept, strength per token) on a canvas, with a frame around low..high. */
export class Strip {
  constructor(canvas, onMove) {
    this.canvas = canvas;
    this.onMove = onMove; // called with a share of the prompt, 0 to 1
    this.view = null;
    this.window = [0, 1];
    this.picture = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.follow(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) this.follow(event);
    });
    canvas.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw(this.view)).observe(canvas);
  }

  follow(event) {
    const box = this.canvas.getBoundingClientRect();
    this.onMove(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  }

  step(event) {
    const steps = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 };
    let target = null;
    if (event.key in steps) target = this.window[0] + steps[event.key];
    if (event.key === "Home") target = 0;
    if (event.key === "End") target = 1;
    if (target === null) return;
    event.preventDefault();
    this.onMove(Math.min(1, Math.max(0, target)));
  }

  /** Show which share of the prompt is on the screen. */
  frame(low, high) {
    this.window = [low, high];
    this.canvas.setAttribute("aria-valuenow", Math.round(100 * low));
    this.canvas.setAttribute("aria-valuetext", `${Math.round(100 * low)}% of the prompt`);
    this.paint();
  }

  draw(view) {
    this.view = view;
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
    this.picture = view && this.pictureOf(view, canvas.width, canvas.height);
    this.paint();
  }

  /** Bars for attention, above a band that is solid where tokens were kept. */
  pictureOf({ kept, strength }, width, height) {
    const [bar, solid, faded] = ["--strip-bar", "--strip-kept", "--strip-gone"].map(colorOf);
    const image = new ImageData(width, height); // pixels: thousands of rectangles take too long
    const pixels = new Uint32Array(image.data.buffer);
    const top = height - Math.round(height / 3); // of the band
    const n = kept.length;
    for (let x = 0; x < width; x++) {
      const low = Math.floor((x * n) / width);
      const high = Math.max(low + 1, Math.floor(((x + 1) * n) / width));
      let numKept = 0;
      let best = 0;
      for (let i = low; i < high; i++) {
        numKept += kept[i];
        if (strength && strength[i] > best) best = strength[i];
      }
      const tall = Math.round(best * (top - 1));
      for (let y = top - 1 - tall; y < top - 1; y++) pixels[y * width + x] = packed(bar);
      const share = numKept ? 0.35 + (0.65 * numKept) / (high - low) : 0;
      const color = packed(solid.map((part, k) => share * part + (1 - share) * faded[k]));
      for (let y = top; y < height; y++) pixels[y * width + x] = color;
    }
    const picture = new OffscreenCanvas(width, height);
    picture.getContext("2d").putImageData(image, 0, 0);
    return picture;
  }

  paint() {
    const { canvas, picture } = this;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!picture) return;
    context.drawImage(picture, 0, 0);
    const [low, high] = this.window;
    context.strokeStyle = getComputedStyle(canvas).color;
    context.lineWidth = 2;
    const left = Math.round(low * (canvas.width - 4)) + 1;
    const wide = Math.max(4, Math.round((high - low) * (canvas.width - 4)));
    context.strokeRect(left, 1, wide, canvas.height - 2);
  }
}

/** A colour of the style sheet, written #rrggbb, as three numbers. */
function colorOf(name) {
  const color = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

/** An opaque pixel of an ImageData, as one number of a little-endian machine. */
function packed([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
