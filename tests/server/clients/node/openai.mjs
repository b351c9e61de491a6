import { failure, key, model, question, require, schema, tooLong, url } from "./start.mjs";

const OpenAI = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const chat = (fields = {}, from = client) =>
  from.chat.completions.create({
    model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 12, ...fields,
  });

let streamed = "", usage = 0, response = "";
for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage?.completion_tokens ?? usage;
}
const events = client.responses.stream({ model, input: question, temperature: 0, max_output_tokens: 12 });
for await (const event of events) if (event.type === "response.output_text.delta") response += event.delta;
const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });

const tools = [{ type: "function", function: { name: "describe_city", parameters: schema } }];
const calling = client.chat.completions.stream({
  model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 60,
  tools, tool_choice: "required", parallel_tool_calls: false,
});
const called = (await calling.finalChatCompletion()).choices[0];

console.log(JSON.stringify({
  chat: (await chat()).choices[0].message.content,
  streamed,
  usage,
  response,
  structured: JSON.parse((await chat({ response_format: format, max_tokens: 60 })).choices[0].message.content),
  embedding: (await client.embeddings.create({ model, input: "one" })).data[0].embedding,
  call: JSON.parse(called.message.tool_calls[0].function.arguments),
  reason: called.finish_reason,
  models: (await client.models.list()).data.map((model) => model.id),
  errors: [
    await failure(() => chat({ model: "gpt-4" })),
    await failure(() => chat({}, stranger)),
    await failure(() => chat({ messages: [{ role: "user", content: tooLong }] })),
  ],
}));
