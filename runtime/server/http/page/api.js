// The server: its address is where the page is. A key is asked for where one is demanded.
import { at } from "./dom.js";
import { Pace, readChunk } from "./chunks.js";
import { jsonEvents } from "./events.js";

const KEY = "icc.key";
let asking = null; // the question for a key, while it is open

const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";

// Whether the server demands a key, which links cannot carry.
export const usesKey = () => key() !== "";

export async function call(path, init = {}) {
  for (;;) {
    const used = key();
    const headers = { ...init.headers, ...(used && { authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...init, headers });
    if (response.status !== 401) return response;
    if (key() === used) await (asking ??= askForKey(used !== ""));
  }
}

// The JSON of an answer; an Error in the server's words if it is none.
export async function json(path, body) {
  const init = body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await call(path, init);
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
  return answer;
}

const isSomething = ({ text, thought, calls, tokens }) => Boolean(text || thought || calls.length || tokens.length);

// Streams an answer: `on(piece, stats)` hears of every chunk. Resolves to {finish, stats}: "stopped" after an abort.
export async function generate(path, body, signal, on) {
  const pace = new Pace(performance.now());
  let finish = null;
  try {
    const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const headers = { "content-type": "application/json" };
    const response = await call(path, {
      method: "POST",
      headers,
      body: JSON.stringify({ ...body, ...options }),
      signal,
    });
    if (!response.ok) {
      const answer = await response.json().catch(() => null);
      throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
    }
    for await (const chunk of jsonEvents(response.body)) {
      const piece = readChunk(chunk);
      pace.came(performance.now(), piece.usage, isSomething(piece));
      finish = piece.finish ?? finish;
      on(piece, pace.stats);
    }
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) finish = "stopped";
    else
      throw new Error(error instanceof TypeError ? `the server cannot be reached (${error.message})` : error.message);
  }
  return { finish, stats: pace.stats };
}

// Opens the dialog until a key is given.
function askForKey(refused) {
  const dialog = at("key-dialog");
  at("key-problem").hidden = !refused;
  at("key").value = "";
  dialog.showModal();
  return new Promise((given) => {
    at("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, at("key").value.trim());
      if (at("key-keep").checked) localStorage.setItem(KEY, at("key").value.trim());
      else localStorage.removeItem(KEY);
      dialog.close();
      asking = null;
      given();
    };
    dialog.oncancel = (event) => event.preventDefault(); // without a key nothing goes on
  });
}
