// The libraries of the key: made, filled and deleted here, and asked, with the sources of the answer.

import { requestOf } from "./asking.js";
import { $, say } from "./page.js";
import { deleteJson, getJson, postForm, postJson, streamChunks } from "./server.js";
import * as words from "./words.js";

const POLL_MS = 1000;
const refused = new Map(); // of each library: what was refused, by file, and why
let looks = null; // the timer that looks again while files are read

const pathOf = (...names) => ["v1/libraries", ...names].join("/");
const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");
const chosen = () => $("library").value;

/** Show the libraries, if the server has any to show. */
export async function connect(hasLibraries) {
  $("libraries").hidden = !hasLibraries;
  if (hasLibraries) await list();
}

export function listen(on, submit) {
  submit("library-form", () => tell(make));
  on("library", "change", () => tell(show));
  on("library-files", "change", () => tell(upload));
  on("library-delete", "click", () => tell(removeLibrary));
}

async function tell(act) {
  say("library-status", "");
  try {
    await act();
  } catch (error) {
    say("library-status", words.errorWords(error));
  }
}

async function list(name = chosen()) {
  const { data } = await getJson("v1/libraries");
  const options = data.map(({ id }) => new Option(id, id));
  $("library").replaceChildren(new Option("the document below", ""), ...options);
  $("library").value = data.some(({ id }) => id === name) ? name : "";
  await show();
}

async function make() {
  const { id } = await postJson("v1/libraries", { name: $("library-name").value.trim() });
  $("library-name").value = "";
  await list(id);
  $("library-files").focus();
}

async function removeLibrary() {
  const name = chosen();
  if (!confirm(`Delete the library ${name} and all of its files?`)) return;
  await deleteJson(pathOf(inPath(name)));
  refused.delete(name);
  await list("");
  say("library-status", `${name} is deleted.`);
  $("library").focus();
}

async function removeFile(name, path) {
  await deleteJson(pathOf(inPath(name), "files", inPath(path)));
  await show();
  say("library-status", `${path} is deleted.`);
  $("library-files").focus();
}

/** Send the files one after another: the server reads one at a time, and has a limit of waiting ones. */
async function upload() {
  const name = chosen();
  const files = [...$("library-files").files];
  $("library-files").value = ""; // the same file can be picked again
  refused.set(name, new Map());
  for (const [at, file] of files.entries()) {
    say("library-status", `Reading ${file.name}, file ${at + 1} of ${files.length}…`);
    const form = new FormData();
    form.append("file", file, file.name);
    const reply = postForm(`${pathOf(inPath(name), "files")}?wait=true`, form);
    reply.catch(() => {}); // it is awaited below
    await show();
    try {
      const { status, error } = await reply;
      if (status === "failed") refused.get(name).set(file.name, error);
    } catch (error) {
      refused.get(name).set(file.name, words.errorWords(error));
    }
  }
  await show();
  const count = refused.get(name).size;
  const bad = count ? ` ${count} refused: the list says why.` : "";
  say("library-status", `${files.length - count} of ${files.length} files added.${bad}`);
}

/** Show the files of the chosen library, and look again while some are being read. */
async function show() {
  clearTimeout(looks);
  const name = chosen();
  $("library-open").hidden = !name;
  if (!name) return;
  const [library, { data }] = await Promise.all([
    getJson(pathOf(inPath(name))),
    getJson(pathOf(inPath(name), "files")),
  ]);
  if (name !== chosen()) return; // another one was chosen meanwhile
  const { files, windows, tokens, reading, error } = library;
  const waiting = reading ? ` ${words.count(reading)} being read.` : "";
  const wrong = error ? ` It cannot be asked: ${error}` : "";
  const size = `Files: ${words.count(files)}, windows: ${words.count(windows)}, tokens: ${words.count(tokens)}.`;
  say("library-size", `${size}${waiting}${wrong}`);
  const why = new Map(refused.get(name));
  const items = data.map((file) => {
    if (file.status === "failed") why.delete(file.id);
    return fileItem(name, file);
  });
  for (const [path, message] of why) items.push(item(`${path}: refused. ${message}`, true));
  $("library-list").replaceChildren(...items);
  const lookAgain = () => show().catch((error) => say("library-status", words.errorWords(error)));
  if (reading) looks = setTimeout(lookAgain, POLL_MS);
}

function fileItem(name, { id, status, windows, tokens, error }) {
  const said = {
    ready: `windows: ${words.count(windows)}, tokens: ${words.count(tokens)}`,
    reading: `being read, ${words.count(tokens)} tokens so far`,
    failed: `refused. ${error}`,
  }[status];
  const element = item(`${id}: ${said} `, status === "failed");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Delete";
  button.setAttribute("aria-label", `Delete ${id}`);
  button.addEventListener("click", () => tell(() => removeFile(name, id)));
  element.append(button);
  return element;
}

function item(text, isWrong = false) {
  const element = document.createElement("li");
  element.textContent = text;
  element.classList.toggle("error", isWrong);
  return element;
}

/** Ask a library; the answer and its sources are shown as they come. */
export async function answer(library, given, signal) {
  const filter = { library };
  if (given.keep !== null) filter.keep = given.keep;
  const candidates = $("library-candidates").value;
  if (candidates) filter.candidates = Number(candidates);
  const { path, body } = requestOf({ ...given, document: "" }, { model: given.model, filter });
  const { document: _, question: __, ...sent } = body;
  $("intro").hidden = $("shown").hidden = true;
  $("sourced").hidden = false;
  say("sourced-question", `${given.question} (${library})`);
  say("sourced-answer", "");
  say("sourced-note", "");
  $("sources").replaceChildren();
  for await (const chunk of streamChunks(path, sent, signal)) {
    if (chunk.filter) showSources(chunk.filter);
    const part = chunk.choices?.[0];
    $("sourced-answer").append(part?.delta?.content ?? part?.delta?.reasoning_content ?? part?.text ?? "");
  }
}

function showSources({ searched, found, sources }) {
  const read = searched ? `${words.count(searched.windows)} windows searched, ${searched.read} read. ` : "";
  const doubt = found === false ? "The question looks at no place in particular: do not trust the answer. " : "";
  const kept = sources?.length ? "Sources are what was kept, the best first." : "Nothing was found.";
  say("sourced-note", `${read}${doubt}${kept}`);
  $("sources").replaceChildren(...(sources ?? []).map(sourceItem));
  $("sourced").scrollIntoView({ block: "nearest" }); // on a narrow screen it is below the form
}

function sourceItem({ file, heading, lines, pages, text }) {
  const range = (word, [first, last]) => (first === last ? `${word} ${first}` : `${word}s ${first} to ${last}`);
  const place = pages ? range("page", pages) : lines ? range("line", lines) : "";
  const element = item([file, heading, place].filter(Boolean).join(", "));
  const quote = document.createElement("blockquote");
  quote.textContent = text;
  element.append(quote);
  return element;
}
