// Vercel AI SDK
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

export const ENVIRONMENT = "javascript";
export const APIS = ["compatible", "chat", "responses"];
const FORECAST = z.object({
  city: z.enum(["Paris", "London"]),
  degrees: z.number().int().min(-20).max(40),
});
const stopWhen = isStepCount(3);

function options(server, added = {}) {
  const place = { baseURL: server.url, apiKey: "none" };
  let model;
  if (server.api === "compatible") {
    const settings = { name: "gemserve", includeUsage: true, supportsStructuredOutputs: true };
    const metadataExtractor = reportReader();
    model = createOpenAICompatible({ ...place, ...settings, metadataExtractor })("builtin");
  } else {
    const provider = createOpenAI({ ...place, fetch: adding(added) });
    model = server.api === "chat" ? provider.chat("builtin") : provider("builtin");
  }
  return { model, maxRetries: 0, providerOptions: { gemserve: added } };
}

// The OpenAI provider has no place for further fields, but takes a `fetch`.
function adding(added) {
  return (url, request) =>
    fetch(url, { ...request, body: JSON.stringify({ ...JSON.parse(request.body), ...added }) });
}

function reportReader() {
  return {
    extractMetadata: async ({ parsedBody }) => ({ gemserve: { filter: parsedBody.filter } }),
    createStreamExtractor() {
      let filter;
      return {
        processChunk: (chunk) => (filter ??= chunk?.filter),
        buildMetadata: () => ({ gemserve: { filter } }),
      };
    },
  };
}

function weather(server) {
  return tool({
    description: "Tell the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      assert.equal(city, "Paris");
      return server.weather;
    },
  });
}

export async function chat(server) {
  const result = await generateText({
    ...options(server), instructions: "Be brief.", prompt: "Hi", maxOutputTokens: 7 });
  assert.equal(result.text, server.text);
  assert.equal(result.usage.outputTokens, 4);
  assert.equal(result.finishReason, "stop");
}

export async function stream(server) {
  const result = streamText({ ...options(server), prompt: "Hi", maxOutputTokens: 7 });
  const parts = [];
  for await (const part of result.textStream) parts.push(part);
  assert.equal(parts.join(""), server.text);
  assert.ok(parts.length > 1);
  assert.equal((await result.usage).outputTokens, 4);
}

export async function typed(server) {
  const result = await generateText({
    ...options(server), prompt: "Paris?", output: Output.object({ schema: FORECAST }) });
  FORECAST.parse(result.output);
}

export async function typed_stream(server) {
  const result = streamText({
    ...options(server), prompt: "Paris?", output: Output.object({ schema: FORECAST }) });
  for await (const part of result.partialOutputStream) assert.ok(part);
  FORECAST.parse(await result.output);
}

export async function typed_choice(server) {
  const output = Output.choice({ options: ["Paris", "London"] });
  const result = await generateText({ ...options(server), prompt: "Where?", output });
  assert.ok(["Paris", "London"].includes(result.output));
}

export async function forced_call(server) {
  const result = await generateText({
    ...options(server),
    prompt: "Paris?",
    toolChoice: { type: "tool", toolName: "weather" },
    tools: { weather: tool({ inputSchema: FORECAST }) },
  });
  assert.equal(result.toolCalls[0].toolName, "weather");
  FORECAST.parse(result.toolCalls[0].input);
}

export async function forced_call_stream(server) {
  const result = streamText({
    ...options(server),
    prompt: "Paris?",
    toolChoice: "required",
    tools: { weather: tool({ inputSchema: FORECAST }) },
  });
  await result.consumeStream();
  FORECAST.parse((await result.toolCalls)[0].input);
}

export async function tools(server) {
  const result = await generateText({
    ...options(server), prompt: "Paris?", tools: { weather: weather(server) }, stopWhen });
  assert.equal(result.text, server.text);
  assert.equal(result.steps.length, 2);
}

export async function tools_stream(server) {
  const result = streamText({
    ...options(server), prompt: "Paris?", tools: { weather: weather(server) }, stopWhen });
  await result.consumeStream();
  assert.equal((await result.steps).at(-1).text, server.text);
}

export async function tools_and_schema(server) {
  const result = await generateText({
    ...options(server),
    prompt: "Paris?",
    tools: { weather: weather(server) },
    output: Output.object({ schema: FORECAST }),
    stopWhen,
  });
  assert.equal(result.output.degrees, 21);
}

export async function errors(server) {
  await assert.rejects(
    generateText({ ...options(server, { filter: { keep: 3 } }), prompt: "Hi" }),
    (error) =>
      APICallError.isInstance(error) && error.statusCode === 400 && /filter.keep/.test(error.message),
  );
}

export async function cancel(server) {
  const controller = new AbortController();
  const result = streamText({
    ...options(server), prompt: "Hi", abortSignal: controller.signal, onError() {} });
  for await (const part of result.textStream) if (part) controller.abort();
}

export async function filter(server) {
  const filter = { method: "sieve", keep: 512 };
  const result = await generateText({ ...options(server, { filter }), prompt: server.document });
  assert.equal(result.text, server.text);
  if (server.api === "compatible") {
    const report = result.providerMetadata.gemserve.filter;
    assert.equal(report.kept_tokens - report.protected_tokens, 512);
  }
}
