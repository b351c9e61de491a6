import { failure, key, model, question, require, schema, tooLong, url } from "./start.mjs";

const { embed, generateText, jsonSchema, Output, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const provider = (apiKey) =>
  createOpenAICompatible({
    name: "fastinfer", baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  });
const chat = (fields = {}, from = provider(key)) =>
  generateText({
    model: from(model), prompt: question, temperature: 0, maxOutputTokens: 12, maxRetries: 0, ...fields,
  });

let streamed = "";
const stream = streamText({
  model: provider(key)(model), prompt: question, temperature: 0, maxOutputTokens: 12, maxRetries: 0,
});
for await (const text of stream.textStream) streamed += text;
const output = Output.object({ schema: jsonSchema(schema) });
const embeddingModel = provider(key).embeddingModel ?? provider(key).textEmbeddingModel;

const tools = { describe_city: tool({ inputSchema: jsonSchema(schema) }) };
const called = await chat({ tools, toolChoice: { type: "tool", toolName: "describe_city" }, maxOutputTokens: 60 });

console.log(JSON.stringify({
  chat: (await chat()).text,
  streamed,
  usage: (await stream.usage).outputTokens,
  structured: (await chat({ output, maxOutputTokens: 60 })).output,
  call: called.toolCalls[0].input,
  embedding: (await embed({ model: embeddingModel(model), value: "one" })).embedding,
  errors: [
    await failure(() => chat({ model: provider(key)("gpt-4") })),
    await failure(() => chat({}, provider("wrong"))),
    await failure(() => chat({ prompt: tooLong })),
  ],
}));
