// What a chunk of a streamed answer says, whichever API it came by, and how fast they came.

// {text, thought, calls, tokens, finish, usage}; calls: pieces of calls of tools; tokens: [{text, bytes, logprob, top: [{text, logprob}]}]. An Error where the
// server tells of one.
export function readChunk(chunk) {
  if (chunk.error) throw new Error(chunk.error.message ?? "the server told of an error");
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  return {
    text: choice?.text ?? delta.content ?? "",
    thought: delta.reasoning_content ?? delta.reasoning ?? "",
    calls: delta.tool_calls ?? [],
    tokens: choice?.logprobs ? tokensOf(choice.logprobs) : [],
    finish: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
  };
}

function tokensOf(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map(({ token, bytes, logprob, top_logprobs }) => ({
      text: token,
      bytes,
      logprob,
      top: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, n) => ({
    text,
    bytes: null,
    logprob: logprobs.token_logprobs[n],
    top: Object.entries(logprobs.top_logprobs?.[n] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

// Times of one answer, in milliseconds of a clock that the caller reads.
export class Pace {
  constructor(now) {
    this.begun = now;
    this.first = this.last = null;
    this.count = 0;
    this.prompt = this.cached = null;
    this.firstCount = 0;
  }

  // A chunk came: with the usage so far where the server tells it, else it counts as one token.
  came(now, usage, something) {
    if (something) {
      this.count += 1;
      this.first ??= now;
      this.last = now;
    }
    if (!usage) return;
    this.count = usage.completion_tokens;
    this.prompt = usage.prompt_tokens;
    this.cached = usage.prompt_tokens_details?.cached_tokens ?? null;
    if (something && this.last === this.first) this.firstCount = this.count;
  }

  // {first_ms, tokens, rate: tokens per second after the first, or null, prompt, cached, seconds}
  get stats() {
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    const after = this.count - Math.max(this.firstCount, 1);
    return {
      first_ms: this.first === null ? null : this.first - this.begun,
      tokens: this.count,
      rate: seconds > 0 && after > 0 ? after / seconds : null,
      prompt: this.prompt,
      cached: this.cached,
      seconds: this.last === null ? 0 : (this.last - this.begun) / 1000,
    };
  }
}

const ENDS = {
  length: "cut at the most tokens",
  deadline: "past its deadline",
  error: "the model failed",
  content_filter: "filtered",
};

// The line under an answer: [{label, title}].
export function statsLine(stats, finish) {
  const parts = [];
  const add = (label, title) => parts.push({ label, title });
  if (stats.rate !== null)
    add(
      `${stats.rate >= 100 ? stats.rate.toFixed(0) : stats.rate.toFixed(1)} tokens/s`,
      "tokens per second after the first",
    );
  if (stats.first_ms !== null) add(`first after ${duration(stats.first_ms)}`, "time to first token");
  if (stats.tokens) add(`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`, "length of the answer");
  if (stats.prompt) {
    const cached = stats.cached ? `, ${stats.cached} of them from the prefix cache` : "";
    add(
      `prompt ${stats.prompt}${stats.cached ? ` (${stats.cached} cached)` : ""}`,
      `${stats.prompt} tokens of prompt${cached}`,
    );
  }
  if (finish === "stopped") add("stopped", "you stopped it");
  else if (ENDS[finish]) add(ENDS[finish], "why the answer ends here");
  return parts;
}

export function duration(ms) {
  return ms < 1000
    ? `${ms.toFixed(0)} ms`
    : ms < 60_000
      ? `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`
      : `${(ms / 60_000).toFixed(1)} min`;
}
