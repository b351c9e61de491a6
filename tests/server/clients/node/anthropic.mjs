import { failure, key, model, question, require, schema, tooLong, url } from "./start.mjs";

const { Anthropic } = require("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const fields = { model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 12 };

let streamed = "";
const stream = client.messages.stream(fields);
stream.on("text", (text) => (streamed += text));
const final = await stream.finalMessage();
const stranger = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
const long = [{ role: "user", content: tooLong }];

const tools = [{ name: "describe_city", input_schema: schema }];
const choice = { type: "any", disable_parallel_tool_use: true };
const calling = client.messages.stream({ ...fields, max_tokens: 60, tools, tool_choice: choice });
const called = await calling.finalMessage();

console.log(JSON.stringify({
  chat: (await client.messages.create(fields)).content[0].text,
  streamed,
  usage: final.usage.output_tokens,
  stop: final.stop_reason,
  tokens: (await client.messages.countTokens({ model, messages: fields.messages })).input_tokens,
  call: called.content.at(-1),
  reason: called.stop_reason,
  errors: [
    await failure(() => client.messages.create({ ...fields, model: "gpt-4" })),
    await failure(() => stranger.messages.create(fields)),
    await failure(() => client.messages.create({ ...fields, messages: long })),
  ],
}));
