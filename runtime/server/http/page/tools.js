// Tools that a model may call: their definitions as pasted text, calls as they are streamed, and results.

// {tools, problem} of pasted JSON: one definition or a list of them, as OpenAI's API has them ({type: "function",
// function: {name, ...}}), bare ({name, description, parameters}) or as Anthropic's (`input_schema`).
export function readTools(text) {
  const none = (problem) => ({ tools: [], problem });
  if (!text.trim()) return none("");
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    return none(`not JSON: ${error.message}`);
  }
  const tools = [];
  for (const [n, one] of (Array.isArray(given) ? given : [given]).entries()) {
    const where = `tool ${n + 1}`;
    if (!isObject(one)) return none(`${where} is not an object`);
    if (one.type !== undefined && one.type !== "function" && one.type !== "custom")
      return none(`${where} is of type ${JSON.stringify(one.type)}: only functions can be called here`);
    const { name, description, parameters = one.input_schema, strict } = one.function ?? one;
    if (typeof name !== "string" || !/^[\w-]{1,64}$/.test(name))
      return none(`${where} needs a "name" of up to 64 letters, digits, _ and -`);
    if (tools.some((tool) => tool.function.name === name)) return none(`two tools are named ${name}`);
    if (description !== undefined && typeof description !== "string")
      return none(`the "description" of ${name} is not a text`);
    if (parameters !== undefined && !isObject(parameters))
      return none(`the "parameters" of ${name} are not an object: they are a JSON Schema`);
    const all = { name, description, parameters, strict };
    const there = Object.entries(all).filter(([, value]) => value !== undefined && value !== null);
    tools.push({ type: "function", function: Object.fromEntries(there) });
  }
  return { tools, problem: "" };
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// Adds what a chunk says of calls to those of before: {id, name, arguments}, in their order.
export function addCalls(calls, deltas) {
  for (const { index = 0, id, function: part = {} } of deltas) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }
}

// The calls that can be answered: an answer that was cut may have left half of one.
export function whole(calls) {
  return (calls ?? []).filter((call) => call?.name && pretty(call.arguments) !== null);
}

// JSON text, indented; null where it is none.
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return null;
  }
}
