// What the filter would keep with other budgets: the server is asked, and its replies are kept.

const DELAY_MS = 80; // a slider that moves wants many budgets: only the one where it stays is asked
const MOST_KNOWN = 100; // of one question

/**
 * The newest wish counts: it cancels the request of the one before it, whose reply is never given.
 *
 * `ask(entry, budget, signal)` sends a request, and promises the reply's `filter` object.
 */
export class Choices {
  constructor(ask, delayMs = DELAY_MS) {
    this.ask = ask;
    this.delayMs = delayMs;
    this.known = new WeakMap(); // of each entry: a Map from budgets to replies, the oldest first
    this.abort = null;
  }

  /** The reply for this budget; null if something else was wanted before it came. */
  async wanted(entry, budget) {
    this.cancel();
    const known = this.known.get(entry) ?? new Map();
    this.known.set(entry, known);
    if (known.has(budget)) return known.get(budget);
    this.abort = new AbortController();
    const { signal } = this.abort;
    await new Promise((resume) => setTimeout(resume, this.delayMs));
    if (signal.aborted) return null;
    try {
      const reply = await this.ask(entry, budget, signal);
      if (known.size === MOST_KNOWN) known.delete(known.keys().next().value);
      known.set(budget, reply);
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
