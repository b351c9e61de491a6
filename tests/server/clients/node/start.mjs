// Packages from the folder of FASTINFER_NODE_PACKAGES, and the server that the tests have started.
import { createRequire } from "node:module";

export const require = createRequire(`${process.env.FASTINFER_NODE_PACKAGES}/index.js`);
export const { url, key, model, tooLong } = JSON.parse(process.env.SERVED);
export const question = "Tell me about France.";
export const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, is_capital: { type: "boolean" } },
  required: ["name", "is_capital"],
  additionalProperties: false,
};

// The name of the error that a call ends with.
export async function failure(call) {
  try {
    await call();
    return "none";
  } catch (error) {
    return `${error.constructor.name} ${error.status ?? error.statusCode}`;
  }
}
