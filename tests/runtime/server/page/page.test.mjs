import assert from "node:assert/strict";
import { test } from "node:test";
import { duration, Pace, readChunk, statsLine } from "../../../../runtime/server/http/page/chunks.js";
import * as talk from "../../../../runtime/server/http/page/conversation.js";
import { EventParser, jsonEvents } from "../../../../runtime/server/http/page/events.js";
import { highlight } from "../../../../runtime/server/http/page/highlight.js";
import { FIELDS, problem, sampling } from "../../../../runtime/server/http/page/params.js";
import { agoTicks, between, short, ticks } from "../../../../runtime/server/http/page/scale.js";
import { Store } from "../../../../runtime/server/http/page/store.js";
import * as tools from "../../../../runtime/server/http/page/tools.js";
import { cosine, norm } from "../../../../runtime/server/http/page/vectors.js";

test("events are found however the text is cut", () => {
  const text =
    ': hello\r\ndata: {"a": 1}\r\n\r\nid: 7\ndata: two\ndata:lines\n\nevent: x\n\ndata: last\r\rdata: unfinished';
  const wanted = ['{"a": 1}', "two\nlines", "last"];
  for (let size = 1; size <= text.length; size++) {
    const parser = new EventParser();
    const found = [];
    for (let from = 0; from < text.length; from += size) found.push(...parser.push(text.slice(from, from + size)));
    assert.deepEqual(found, wanted, `pieces of ${size}`);
  }
});

async function collect(bytes, size) {
  const pieces = [];
  for (let from = 0; from < bytes.length; from += size) pieces.push(bytes.slice(from, from + size));
  const found = [];
  for await (const value of jsonEvents(ReadableStream.from(pieces))) found.push(value);
  return found;
}

test("a stream is read up to [DONE], also where characters are cut; a broken one is an error", async () => {
  const encode = (text) => new TextEncoder().encode(text);
  const body = encode('data: {"t":"ä€😀"}\n\ndata: {"t":2}\n\ndata: [DONE]\n\n');
  for (const size of [1, 3, 1000]) assert.deepEqual(await collect(body, size), [{ t: "ä€😀" }, { t: 2 }]);
  await assert.rejects(collect(encode('data: {"t":1}\n\n'), 1000), /broke off/);
});

test("chunks of both APIs say the same", () => {
  const top = [
    { token: "a", logprob: -0.5 },
    { token: "b", logprob: -1 },
  ];
  const logprobs = { content: [{ token: "a", bytes: [97], logprob: -0.5, top_logprobs: top }] };
  const chat = readChunk({ choices: [{ delta: { content: "a" }, logprobs, finish_reason: "stop" }] });
  const plain = { tokens: ["a"], token_logprobs: [-0.5], top_logprobs: [{ a: -0.5, b: -1 }] };
  const complete = readChunk({ choices: [{ text: "a", logprobs: plain, finish_reason: "stop" }] });
  assert.deepEqual({ ...chat, tokens: chat.tokens.map((token) => ({ ...token, bytes: null })) }, complete);
  assert.equal(readChunk({ choices: [{ delta: { reasoning_content: "hm" } }] }).thought, "hm");
  assert.equal(readChunk({ choices: [], usage: { completion_tokens: 3 } }).usage.completion_tokens, 3);
  assert.throws(() => readChunk({ error: { message: "no" } }), /no/);
});

test("the pace counts tokens after the first, by the usage where there is one", () => {
  const pace = new Pace(1000);
  pace.came(1250, { completion_tokens: 2, prompt_tokens: 7 }, true);
  pace.came(1500, { completion_tokens: 7, prompt_tokens: 7 }, true);
  pace.came(2250, { completion_tokens: 12, prompt_tokens: 7, prompt_tokens_details: { cached_tokens: 4 } }, true);
  pace.came(9999, { completion_tokens: 12, prompt_tokens: 7 }, false);
  const { first_ms, tokens, rate, prompt } = pace.stats;
  assert.deepEqual([first_ms, tokens, rate, prompt], [250, 12, 10, 7]);
  assert.deepEqual(
    statsLine(pace.stats, "length").map(({ label }) => label),
    ["10.0 tokens/s", "first after 250 ms", "12 tokens", "prompt 7", "cut at the most tokens"],
  );
  assert.equal(new Pace(0).stats.rate, null);
  assert.deepEqual([12, 1234, 90_000].map(duration), ["12 ms", "1.23 s", "1.5 min"]);
});

test("a conversation keeps every version of a turn", () => {
  const chat = talk.newConversation("Be brief.");
  const question = talk.addTurn(chat, null, "user", "one\ntwo");
  const first = talk.addTurn(chat, question.id, "assistant", "<think>hm</think>A");
  const second = talk.addTurn(chat, question.id, "assistant", "B");
  const more = talk.addTurn(chat, second.id, "user", "more");
  assert.equal(chat.title, "one");
  assert.deepEqual(talk.path(chat), [question, second, more]);
  talk.turnTo(chat, second.id, -1);
  assert.deepEqual(talk.path(chat), [question, first]);
  assert.deepEqual(talk.messages(chat, chat.leaf), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "one\ntwo" },
    { role: "assistant", content: "A" },
  ]);
  talk.turnTo(chat, first.id, 1);
  assert.equal(chat.leaf, more.id); // what was said behind it is shown again
  talk.removeTurn(chat, second.id);
  assert.deepEqual(Object.keys(chat.turns), [question.id, first.id]);
  assert.equal(chat.leaf, first.id);
  talk.removeTurn(chat, question.id);
  assert.deepEqual([chat.leaf, talk.path(chat)], [null, []]);
  const failed = talk.addTurn(chat, null, "assistant", "half");
  failed.error = "broke off";
  assert.deepEqual(talk.messages(chat, failed.id).length, 1);
});

test("tools are read in every shape that they are written in, or it is said what is wrong", () => {
  const parameters = { type: "object" };
  const wanted = [{ type: "function", function: { name: "f", parameters } }];
  for (const given of [
    { name: "f", parameters },
    [{ name: "f", input_schema: parameters }],
    [{ type: "function", name: "f", parameters, strict: null }],
    wanted,
  ])
    assert.deepEqual(tools.readTools(JSON.stringify(given)), { tools: wanted, problem: "" });
  assert.deepEqual(tools.readTools("  "), { tools: [], problem: "" });
  const wrong = [
    ["[{]", /not JSON/],
    ["7", /tool 1 is not an object/],
    ['[{"name": "f"}, {"name": "a b"}]', /tool 2 needs a "name"/],
    ['[{"name": "f"}, {"name": "f"}]', /two tools are named f/],
    ['{"name": "f", "parameters": "x"}', /JSON Schema/],
    ['{"name": "f", "description": 1}', /not a text/],
    ['{"type": "web_search"}', /only functions/],
  ];
  for (const [text, problem] of wrong) assert.match(tools.readTools(text).problem, problem);
});

test("calls come in pieces, and go back with their results", () => {
  const calls = [];
  tools.addCalls(calls, [{ index: 0, id: "a", function: { name: "f", arguments: '{"x"' } }]);
  assert.deepEqual(tools.whole(calls), []);
  const half = [{ id: "a", name: "f", arguments: '{"x"' }];
  tools.addCalls(calls, [{ index: 0, function: { arguments: ": 1}" } }, { index: 1, id: "b", function: { name: "g" } }]);
  assert.deepEqual(tools.whole([...calls, ...half]), calls);
  const chat = talk.newConversation();
  const question = talk.addTurn(chat, null, "user", "q");
  const answer = Object.assign(talk.addTurn(chat, question.id, "assistant"), { calls, thought: "hm" });
  const results = [
    { id: "a", name: "f", content: "1" },
    { id: "b", name: "g", content: "" },
  ];
  Object.assign(talk.addTurn(chat, answer.id, "tool"), { results });
  const call = (id, name, text) => ({ id, type: "function", function: { name, arguments: text } });
  const called = [call("a", "f", '{"x": 1}'), call("b", "g", "{}")];
  assert.deepEqual(talk.messages(chat, chat.leaf).slice(1), [
    { role: "assistant", content: null, reasoning_content: "hm", tool_calls: called },
    { role: "tool", tool_call_id: "a", content: "1" },
    { role: "tool", tool_call_id: "b", content: "" },
  ]);
  assert.match(talk.asMarkdown(chat), /Calls `f` with `{"x": 1}`[^]*\*\*Results\*\*\n\n`f`: 1/);
  answer.calls = half; // it was stopped
  assert.equal(talk.messages(chat, answer.id).length, 1);
});

class Storage {
  constructor(room) {
    Object.assign(this, { room, items: new Map() });
  }
  get length() {
    return this.items.size;
  }
  key(n) {
    return [...this.items.keys()][n];
  }
  getItem(name) {
    return this.items.get(name) ?? null;
  }
  removeItem(name) {
    this.items.delete(name);
  }
  setItem(name, text) {
    const used = [...this.items].reduce((sum, [key, value]) => sum + (key === name ? 0 : value.length), 0);
    if (used + text.length > this.room) throw new Error("QuotaExceededError");
    this.items.set(name, text);
  }
}

test("where the browser is full, the chat that is longest unused goes", () => {
  const store = new Store(new Storage(1400));
  const chats = [1, 2, 3].map((changed) => {
    const chat = talk.newConversation();
    const turn = talk.addTurn(chat, null, "user", `${changed}`.repeat(400));
    return Object.assign(chat, { changed, turns: { [turn.id]: { ...turn, tokens: [1, 2], live: true } } });
  });
  assert.ok(chats.every((chat) => store.save(chat)));
  assert.deepEqual(
    store.list().map(({ changed }) => changed),
    [3, 2],
  );
  assert.deepEqual(Object.keys(Object.values(store.load(chats[2].id).turns)[0]).sort(), [
    "content",
    "id",
    "parent",
    "role",
  ]);
  chats[0].system = "x".repeat(3000);
  assert.equal(store.save(chats[0]), false);
  store.storage.setItem("icc.chat.bad", "{");
  assert.equal(store.load("bad"), null);
});

test("only fields that are filled in and right are sent", () => {
  assert.deepEqual(
    sampling({ temperature: "0.5", top_p: "7", top_k: "", seed: "1.5", max_tokens: " 9 ", stop: "a\n\\n\n" }),
    { temperature: 0.5, max_tokens: 9, stop: ["a", "\n"] },
  );
  const [temperature] = FIELDS;
  assert.deepEqual(
    ["", "1e3", "x", "-1"].map((text) => problem(temperature, text) !== ""),
    [false, true, true, true],
  );
});

test("scales have round marks that hold what is drawn", () => {
  for (const high of [0.013, 1, 7, 99, 100, 1234, 1e6]) {
    const marks = ticks(high);
    assert.ok(
      marks[0] === 0 && marks.at(-1) >= high * 0.999 && marks.length >= 2 && marks.length <= 7,
      `${high}: ${marks}`,
    );
  }
  assert.deepEqual([0, 12.34, 1234, 45_678, 2.5e6, null].map(short), ["0", "12.3", "1234", "45.7k", "2.5M", "–"]);
  assert.ok([60, 300, 3600].every((span) => agoTicks(span).length <= 8 && agoTicks(span)[0] === 0));
});

test("rates are between two polls, and none where the engine began anew", () => {
  const before = {
    at: 10,
    output_tokens: 100,
    prompt_tokens: 50,
    ttft_s: 1,
    ttft_count: 2,
    gap_s: 0,
    gap_count: 0,
    step_s: 0,
    step_count: 0,
  };
  const after = {
    ...before,
    at: 12,
    output_tokens: 160,
    ttft_s: 1.5,
    ttft_count: 3,
    usage: 0.25,
    blocks: 8,
    blocks_cached: 2,
  };
  const found = between(before, after);
  assert.deepEqual(
    [found.output, found.prompt, found.first, found.gap, found.used, found.cached],
    [30, 0, 500, null, 25, 25],
  );
  assert.equal(between({ ...before, output_tokens: 1e6 }, after).output, null);
  assert.equal(between(undefined, after).output, null);
});

test("vectors and colours", () => {
  assert.deepEqual(
    [cosine([1, 0], [0, 2]), cosine([1, 1], [2, 2]).toFixed(3), cosine([0, 0], [1, 1]), norm([3, 4])],
    [0, "1.000", 0, 5],
  );
  const code = 'def f(x):  # note\n    return "a" + 0x1f';
  const parts = highlight(code, "python");
  assert.equal(parts.map(({ text }) => text).join(""), code);
  const kinds = Object.fromEntries(parts.map(({ kind, text }) => [text, kind]));
  assert.deepEqual(
    [kinds.def, kinds.f, kinds["# note"], kinds['"a"'], kinds["0x1f"]],
    ["keyword", "name", "comment", "string", "number"],
  );
});
