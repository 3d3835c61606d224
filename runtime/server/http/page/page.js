// The playground and the live figures. No library, nothing from elsewhere.
"use strict";

const at = (id) => document.getElementById(id);
const FIGURES = [
  ["running", "In the batch", (f) => f.running],
  ["waiting", "Waiting", (f) => f.waiting],
  ["usage", "KV blocks in use", (f) => `${(100 * f.usage).toFixed(1)} %`],
  ["hits", "Prefix hits", (f) => (f.prompt_tokens ? `${(100 * f.cached_tokens / f.prompt_tokens).toFixed(1)} %` : "–")],
  ["rate", "Tokens per second", (f) => f.rate],
  ["prompt", "Prompt tokens", (f) => f.prompt_tokens],
  ["output", "Output tokens", (f) => f.output_tokens],
  ["preemptions", "Preemptions", (f) => f.preemptions],
];
const EVERY_MS = 1000;
let model = "";
let before = null; // the last figures, for rates
let controller = null; // of the request under way

function showFigures(figures) {
  const now = performance.now();
  const seconds = before ? (now - before.now) / 1000 : 0;
  figures.rate = seconds ? Math.max(0, (figures.output_tokens - before.output_tokens) / seconds).toFixed(1) : "–";
  before = { now, output_tokens: figures.output_tokens };
  for (const [name, , read] of FIGURES) at(`figure-${name}`).textContent = read(figures);
  at("state").textContent = figures.ready ? "ready" : "not ready";
}

async function poll() {
  try {
    const response = await fetch("figures");
    if (!response.ok) throw new Error(response.status);
    showFigures(await response.json());
  } catch {
    at("state").textContent = "no answer";
  }
  setTimeout(poll, EVERY_MS);
}

function showTokens(times) {
  const gaps = times.slice(1).map((time, i) => time - times[i]);
  const most = Math.max(...gaps, 1);
  const width = 600 / Math.max(gaps.length, 1);
  at("tokens").replaceChildren(...gaps.map((gap, i) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = Math.max(1, 78 * gap / most);
    for (const [name, value] of Object.entries({ x: i * width, y: 80 - height, width: width * 0.8, height }))
      bar.setAttribute(name, value);
    return bar;
  }));
}

function body() {
  const prompt = at("prompt").value;
  const chat = at("kind").value === "chat/completions";
  return JSON.stringify({
    model,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function ask(event) {
  event.preventDefault();
  const answer = at("answer");
  const begun = performance.now();
  const times = [];
  let usage = null;
  controller = new AbortController();
  answer.textContent = at("timing").textContent = "";
  answer.className = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  try {
    const headers = { "content-type": "application/json" };
    const signal = controller.signal;
    const response = await fetch(`v1/${at("kind").value}`, { method: "POST", headers, body: body(), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const text = chunk.choices[0]?.text ?? chunk.choices[0]?.delta?.content ?? "";
      if (!text) continue;
      times.push(performance.now());
      answer.append(text);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.className = "failed";
      answer.append(error.message);
    }
  }
  finish(begun, times, usage);
}

function finish(begun, times, usage) {
  at("send").disabled = false;
  at("stop").disabled = true;
  if (!times.length) return;
  const first = times[0] - begun;
  const count = usage ? usage.completion_tokens : times.length;
  const rest = (times.at(-1) - times[0]) / 1000;
  const rate = rest > 0 && count > 1 ? `, ${((count - 1) / rest).toFixed(1)} tokens/s` : "";
  at("timing").textContent = `first token ${first.toFixed(0)} ms, ${count} tokens${rate}`;
  showTokens(times);
}

async function begin() {
  for (const [name, label] of FIGURES) {
    const term = document.createElement("dt");
    const value = document.createElement("dd");
    term.textContent = label;
    value.id = `figure-${name}`;
    at("figures").append(term, value);
  }
  at("ask").addEventListener("submit", ask);
  at("stop").addEventListener("click", () => controller?.abort());
  model = (await (await fetch("v1/models")).json()).data[0].id;
  at("model").textContent = model;
  poll();
}

begin();
