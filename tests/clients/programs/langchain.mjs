// LangChain JS
import assert from "node:assert";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

export const ENVIRONMENT = "javascript";
export const APIS = ["chat", "responses"];
const FORECAST = z.object({
  city: z.enum(["Paris", "London"]),
  degrees: z.number().int().min(-20).max(40),
});
const PLACE = z.object({ city: z.enum(["Paris", "London"]) });

function model(server, fields = {}) {
  return new ChatOpenAI({
    model: "builtin",
    apiKey: "none",
    maxRetries: 0,
    configuration: { baseURL: server.url },
    useResponsesApi: server.api === "responses",
    ...fields,
  });
}

function weather(server, schema = z.object({ city: z.string() })) {
  const description = "Tell the weather in a city.";
  return tool(async () => server.weather, { name: "weather", description, schema });
}

export async function chat(server) {
  const reply = await model(server, { maxTokens: 7 }).invoke("Hi");
  assert.equal(reply.text, server.text);
  assert.equal(reply.usage_metadata.output_tokens, 4);
}

export async function stream(server) {
  const parts = [];
  let usage;
  for await (const part of await model(server, { maxTokens: 7 }).stream("Hi")) {
    parts.push(part.text);
    usage = part.usage_metadata ?? usage;
  }
  assert.equal(parts.join(""), server.text);
  assert.equal(usage.output_tokens, 4);
}

async function typed_by(server, method) {
  const asker = model(server).withStructuredOutput(FORECAST, { name: "forecast", method });
  FORECAST.parse(await asker.invoke("Paris?"));
}

export async function typed_schema(server) {
  await typed_by(server, "jsonSchema");
}

export async function typed_call(server) {
  await typed_by(server, "functionCalling");
}

export async function typed_given_json(server) {
  await typed_by(server, "jsonMode");
}

export async function forced_call(server) {
  const asker = model(server).bindTools([weather(server, PLACE)], { tool_choice: "weather" });
  const [call] = (await asker.invoke("Paris?")).tool_calls;
  assert.equal(call.name, "weather");
  PLACE.parse(call.args);
}

// fault of the client: responses_forced_call_required: `tool_choice: "required"` is not sent, a tool's name is
export async function forced_call_required(server) {
  const asker = model(server).bindTools([weather(server, PLACE)], { tool_choice: "required" });
  PLACE.parse((await asker.invoke("Paris?")).tool_calls[0].args);
}

export async function forced_call_stream(server) {
  const asker = model(server).bindTools([weather(server, PLACE)], { tool_choice: "weather" });
  let whole;
  for await (const part of await asker.stream("Paris?")) whole = whole?.concat(part) ?? part;
  PLACE.parse(whole.tool_calls[0].args);
}

async function converse(server, asker) {
  const messages = [new HumanMessage("What is the weather in Paris?")];
  messages.push(await asker.invoke(messages));
  const [call] = messages[1].tool_calls;
  assert.deepEqual(call.args, { city: "Paris" });
  messages.push(new ToolMessage({ content: server.weather, tool_call_id: call.id }));
  return asker.invoke(messages);
}

export async function tools(server) {
  const reply = await converse(server, model(server).bindTools([weather(server)]));
  assert.equal(reply.text, server.text);
}

export async function tools_and_schema(server) {
  const json_schema = { name: "forecast", strict: true, schema: z.toJSONSchema(FORECAST) };
  const response_format = { type: "json_schema", json_schema };
  const asker = model(server).bindTools([weather(server)], { response_format, strict: true });
  const reply = await converse(server, asker);
  assert.equal(FORECAST.parse(JSON.parse(reply.text)).degrees, 21);
}

export async function errors(server) {
  const asker = model(server, { modelKwargs: { filter: { keep: 3 } } });
  await assert.rejects(
    asker.invoke("Hi"), (error) => error.status === 400 && error.param === "filter.keep");
}

export async function cancel(server) {
  const controller = new AbortController();
  try {
    const stream = await model(server).stream("Hi", { signal: controller.signal });
    for await (const part of stream) if (part.text) controller.abort();
  } catch (error) {
    assert.match(`${error.name} ${error.message}`, /[Aa]bort/);
  }
}

export async function filter(server) {
  const asker = model(server, {
    modelKwargs: { filter: { method: "sieve", keep: 512 } }, __includeRawResponse: true });
  const reply = await asker.invoke(server.document);
  assert.equal(reply.text, server.text);
  if (server.api === "chat") {
    const report = reply.additional_kwargs.__raw_response.filter;
    assert.equal(report.kept_tokens - report.protected_tokens, 512);
  }
}
