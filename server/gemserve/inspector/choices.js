// What the filter would keep with another budget or by other heads: the server is asked, and its
// replies are kept.

const DELAY_MS = 80; // a slider that moves wants many budgets: only the one where it stays is asked
const MOST_KNOWN = 100; // of one question

/**
 * The newest wish counts: it cancels the request of the one before it, whose reply is never given.
 *
 * `ask(entry, options, signal)` sends a request, and promises the reply's `filter` object. `options`
 * are those of the filter that differ from the question's.
 */
export class Choices {
  constructor(ask, delayMs = DELAY_MS) {
    this.ask = ask;
    this.delayMs = delayMs;
    this.known = new WeakMap(); // of each entry: a Map from options to replies, the oldest first
    this.abort = null;
  }

  /** The reply for these options; null if something else was wanted before it came. */
  async wanted(entry, options) {
    this.cancel();
    const known = this.known.get(entry) ?? new Map();
    this.known.set(entry, known);
    const name = JSON.stringify(options);
    if (known.has(name)) return known.get(name);
    this.abort = new AbortController();
    const { signal } = this.abort;
    await new Promise((resume) => setTimeout(resume, this.delayMs));
    if (signal.aborted) return null;
    try {
      const reply = await this.ask(entry, options, signal);
      if (known.size === MOST_KNOWN) known.delete(known.keys().next().value);
      known.set(name, reply);
      return signal.aborted ? null : reply;
    } catch (error) {
      if (signal.aborted) return null;
      throw error;
    }
  }

  /** Nothing is wanted any more. */
  cancel() {
    this.abort?.abort();
  }
}
