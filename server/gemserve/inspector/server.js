// Talks to the server that the page came from, by addresses relative to the page.

const KEY = "gemserve.key"; // in sessionStorage: gone when the tab is closed

export class ServerError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export function readKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** An address of the server, wherever a proxy has put it. */
export function addressOf(path) {
  return new URL(path, document.baseURI).href;
}

async function send(path, body, signal, method = body === undefined ? "GET" : "POST") {
  const key = readKey();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const isForm = body instanceof FormData; // the browser names its type, with the boundary
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(addressOf(path), {
      method,
      headers,
      body: isForm || body === undefined ? body : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!reply.ok) throw await errorOf(reply);
  return reply;
}

async function errorOf(reply) {
  let error = {};
  try {
    error = (await reply.json()).error ?? {};
  } catch {
    // a proxy's page, perhaps
  }
  const message = error.message ?? `The server answered with status ${reply.status}.`;
  return new ServerError(message, {
    status: reply.status,
    code: error.code ?? "",
    retryAfter: reply.headers.get("Retry-After") ?? "",
  });
}

export async function getJson(path, signal) {
  return (await send(path, undefined, signal)).json();
}

export async function postJson(path, body, signal) {
  return (await send(path, body, signal)).json();
}

export async function postForm(path, form, signal) {
  return (await send(path, form, signal)).json();
}

export async function deleteJson(path, signal) {
  return (await send(path, undefined, signal, "DELETE")).json();
}

/** The chunks of a stream, up to its [DONE]. An error in the stream is thrown. */
export async function* streamChunks(path, body, signal) {
  const reply = await send(path, { ...body, stream: true }, signal);
  let isDone = false;
  for await (const data of eventsOf(reply.body.getReader(), signal)) {
    if (data === "[DONE]") {
      isDone = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code ?? "" });
    yield chunk;
  }
  if (!isDone) throw gone();
}

function gone() {
  return new ServerError("The server ended the connection before the answer was complete.", {
    code: "gone",
  });
}

/** The data of server-sent events. */
async function* eventsOf(reader, signal) {
  const decoder = new TextDecoder();
  let parts = []; // of a line that has not ended: a long line comes in many pieces
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw gone();
      }
      if (piece.done) return;
      const lines = decoder.decode(piece.value, { stream: true }).split("\n");
      parts.push(lines[0]);
      for (const line of lines.slice(1)) {
        const whole = parts.join("");
        parts = [line];
        if (whole.startsWith("data: ")) yield whole.slice(6).trimEnd();
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // else the server goes on for a reader that has stopped
  }
}
