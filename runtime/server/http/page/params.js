// The fields of the sampling panel, as the API names them, and what a request gets of them.

// slider: [low, high, step] of the slider; low, high: what the API takes; whole: only integers; more: seldom needed
export const FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    low: 0,
    high: 100,
    slider: [0, 2, 0.05],
    help: "0 always takes the likeliest token; higher is more varied",
  },
  {
    name: "top_p",
    label: "Top p",
    low: 0,
    high: 1,
    slider: [0, 1, 0.01],
    help: "draws from the likeliest tokens whose probabilities add up to this",
  },
  {
    name: "top_k",
    label: "Top k",
    low: 0,
    high: 2 ** 31 - 1,
    whole: true,
    help: "draws from so many of the likeliest tokens; 0 is all",
  },
  {
    name: "min_p",
    label: "Min p",
    low: 0,
    high: 1,
    slider: [0, 1, 0.01],
    help: "leaves out tokens less likely than this share of the likeliest",
  },
  { name: "max_tokens", label: "Most tokens", low: 1, high: 2 ** 31 - 1, whole: true, help: "the answer ends there" },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    low: 0.01,
    high: 100,
    more: true,
    help: "above 1: tokens that were there become less likely",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    low: -2,
    high: 2,
    more: true,
    help: "taken once from tokens of the answer so far",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    low: -2,
    high: 2,
    more: true,
    help: "taken from them each time they occurred",
  },
  {
    name: "seed",
    label: "Seed",
    low: 0,
    high: Number.MAX_SAFE_INTEGER,
    whole: true,
    more: true,
    help: "the same seed gives the same answer",
  },
];

export const TOP_LOGPROBS = 5;

// What is wrong with a field's text, or "". Empty is right: the engine's own default.
export function problem(field, text) {
  if (!text.trim()) return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return "not a number";
  if (field.whole && !Number.isInteger(value)) return "a whole number";
  if (value < field.low || value > field.high) return `${field.low} to ${field.high >= 2 ** 31 - 1 ? "…" : field.high}`;
  return "";
}

// The sampling fields of a request: those that are filled in and right. `stop` has one string per line.
export function sampling(values) {
  const body = {};
  for (const field of FIELDS) {
    const text = values[field.name] ?? "";
    if (text.trim() && !problem(field, text)) body[field.name] = Number(text);
  }
  const stop = (values.stop ?? "")
    .split("\n")
    .filter(Boolean)
    .map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (stop.length) body.stop = stop;
  return body;
}
