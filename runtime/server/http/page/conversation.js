// A conversation is a tree of turns: an edit or another answer is a sibling, and nothing that was said is lost.
//
// {id, title, system, created, leaf, turns: {id: {id, parent, role, content, ...}}}; `leaf` is the end of what is shown.
// An assistant's turn may have `calls` of tools; the turn behind it is then a "tool" with `results` for all of them.
import { whole } from "./tools.js";

let count = 0;
const newId = () => `${Date.now().toString(36)}${(count++).toString(36)}${Math.random().toString(36).slice(2, 6)}`;

export function newConversation(system = "") {
  return { id: newId(), title: "", system, created: Date.now(), changed: Date.now(), leaf: null, turns: {} };
}

// The turns from the first to the leaf.
export function path(conversation, leaf = conversation.leaf) {
  const turns = [];
  for (let turn = conversation.turns[leaf]; turn; turn = conversation.turns[turn.parent]) turns.unshift(turn);
  return turns;
}

// The other versions of a turn and itself, oldest first.
export function versions(conversation, id) {
  const { parent } = conversation.turns[id];
  return Object.values(conversation.turns).filter((turn) => turn.parent === parent);
}

// A new turn behind `parent` (null: at the beginning); it becomes the leaf.
export function addTurn(conversation, parent, role, content = "") {
  const turn = { id: newId(), parent, role, content };
  conversation.turns[turn.id] = turn;
  conversation.leaf = turn.id;
  conversation.changed = Date.now();
  if (!conversation.title && role === "user") conversation.title = titleOf(content);
  return turn;
}

// Shows the version of a turn that is `step` further, with what was last said behind it.
export function turnTo(conversation, id, step) {
  const all = versions(conversation, id);
  const next = all[all.findIndex((turn) => turn.id === id) + step];
  if (!next) return;
  conversation.leaf = next.id;
  const turns = Object.values(conversation.turns);
  for (let last; (last = turns.findLast((turn) => turn.parent === conversation.leaf));) conversation.leaf = last.id;
}

// Takes a turn away, with all that follows it; another version of it is shown, or what was before.
export function removeTurn(conversation, id) {
  const { parent } = conversation.turns[id];
  const gone = new Set([id]);
  for (const turn of Object.values(conversation.turns)) if (gone.has(turn.parent)) gone.add(turn.id); // parents come first
  for (const each of gone) delete conversation.turns[each];
  const sibling = Object.values(conversation.turns).findLast((turn) => turn.parent === parent);
  conversation.leaf = sibling?.id ?? parent;
  if (sibling) turnTo(conversation, sibling.id, 0);
}

// What the API is sent for an answer behind `leaf`: failed turns and empty ones are left out.
export function messages(conversation, leaf) {
  const said = path(conversation, leaf).filter(isSaid);
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  return [
    ...system,
    ...said.flatMap((turn) => (turn.role === "tool" ? turn.results.map(resultMessage) : [message(turn)])),
  ];
}

const isSaid = ({ role, content, error, calls }) =>
  role === "tool" || (role === "assistant" ? !error && (content || whole(calls).length > 0) : content);

// What was thought before a call goes with it: the answer to its result builds on it.
function message({ role, content, thought, calls }) {
  if (role !== "assistant") return { role, content };
  const called = whole(calls).map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text || "{}" },
  }));
  if (!called.length) return { role, content: answered(content) };
  const thinking = thought ? { reasoning_content: thought } : {};
  return { role, content: answered(content) || null, ...thinking, tool_calls: called };
}

const resultMessage = ({ id, content }) => ({ role: "tool", tool_call_id: id, content });

// An answer without what was thought before it, as templates expect history.
export function answered(content) {
  return content.replace(/^\s*<(think|thinking|reasoning)>[\s\S]*?<\/\1>\s*/, "");
}

export const SPEAKERS = { user: "You", assistant: "Assistant", tool: "Results" };

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Chat"}`];
  if (conversation.system.trim()) parts.push(`**System**\n\n${conversation.system}`);
  for (const turn of path(conversation)) {
    const calls = (turn.calls ?? []).map(({ name, arguments: text }) => `Calls \`${name}\` with \`${text}\``);
    const results = (turn.results ?? []).map(({ name, content }) => `\`${name}\`: ${content}`);
    parts.push([`**${SPEAKERS[turn.role]}**`, turn.content, ...calls, ...results].filter(Boolean).join("\n\n"));
  }
  return parts.join("\n\n") + "\n";
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
