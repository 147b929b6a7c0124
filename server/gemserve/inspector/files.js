// Reads a file that was picked or dropped: a text here, a PDF by the server.

import { postForm } from "./server.js";

const MAGIC_WITHIN = 1024; // bytes in which the mark of a PDF may stand
const LOOKED_AT = 4096;

/** The text of a file, and a `note` on what it was read from. Throws an error that names the file. */
export async function textOf(file) {
  const head = new Uint8Array(await file.slice(0, LOOKED_AT).arrayBuffer());
  const start = new TextDecoder("latin1").decode(head);
  if (start.slice(0, MAGIC_WITHIN).includes("%PDF-")) return textOfPdf(file);
  if (head.includes(0)) {
    throw new Error(`${file.name} is neither text nor a PDF. Convert it to text first.`);
  }
  return { text: await file.text(), note: "" };
}

async function textOfPdf(file) {
  const form = new FormData();
  form.append("file", file, file.name);
  const { text, pages } = await postForm("v1/documents/text", form);
  return { text, note: `${pages} ${pages === 1 ? "page" : "pages"} of ${file.name}` };
}
