// The page: what it shows, in which colours, and its keys.
import { json, usesKey } from "./api.js";
import { Chat } from "./chat.js";
import { ChatList } from "./chats.js";
import { Complete } from "./complete.js";
import { path } from "./conversation.js";
import { at, h } from "./dom.js";
import { Embed } from "./embed.js";
import { Load } from "./load.js";
import { short } from "./scale.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";

const THEMES = ["system", "light", "dark"];
const store = new Store(localStorage);
const views = {}; // by the names in the address: those that this engine has
let current = "";

async function begin() {
  setTheme(store.read("theme", "system"));
  const about = await json("about");
  at("model").textContent = about.model;
  document.title = `${about.model} · icc`;
  const settings = new Settings(store, about.sampling);
  const request = () => settings.request();
  const tools = (answersResults) => settings.tools(answersResults);
  if (about.chat) views.chat = chatOf(about, { request, tools });
  if (about.task === "generate") views.complete = new Complete({ store, about, request });
  else views.embed = new Embed({ store, about });
  views.load = new Load({ about, changed: showState });
  for (const name of Object.keys(views)) at(`tab-${name}`).hidden = false;
  at("facts").replaceChildren(...facts(about));
  at("layout").classList.toggle("no-panel", about.task !== "generate");
  at("docs").hidden = usesKey();
  window.addEventListener("hashchange", route);
  document.addEventListener("keydown", pressed);
  route();
  document.body.dataset.ready = "";
}

function chatOf(about, { request, tools }) {
  const list = new ChatList(store, () => setOpen("chats", !narrow()));
  const chat = new Chat({ store, about, request, tools, changed: () => list.draw() });
  list.chat = chat;
  list.draw();
  at("system").addEventListener("input", () => chat.setSystem(at("system").value));
  chat.shown = () => {
    chat.fit();
    if (!narrow()) chat.input.focus();
  };
  return chat;
}

function route() {
  const wanted = location.hash.slice(1);
  const name = views[wanted] ? wanted : Object.keys(views)[0];
  views[current]?.hidden?.();
  current = name;
  for (const known of ["chat", "complete", "embed", "load"]) {
    at(`view-${known}`).hidden = known !== name;
    if (known === name) at(`tab-${known}`).setAttribute("aria-current", "page");
    else at(`tab-${known}`).removeAttribute("aria-current");
  }
  at("layout").dataset.view = name;
  at("chats-toggle").hidden = name !== "chat";
  at("panel-toggle").hidden = name !== "chat" && name !== "complete";
  if (narrow()) closeAsides();
  views[name].shown?.();
}

function showState({ state, rate, running, waiting }) {
  const busy = running > 0 ? ` · ${running} running${waiting ? `, ${waiting} waiting` : ""}` : "";
  const speed = rate ? `${short(rate)} tokens/s${busy}` : state;
  at("state").dataset.state = state === "ready" ? (running ? "busy" : "ready") : "bad";
  at("state").lastChild.textContent = speed;
  at("state").title = `${state}${busy}`;
}

function facts(about) {
  const { embedding, sampling } = about;
  const defaults = Object.entries(sampling)
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${value}`);
  const rows = [
    ["Model", `${about.model} (${about.architecture})`],
    ["Parameters", short(about.parameters)],
    ["Quantization", `${about.quantization}, ${about.bits_per_weight} bits per weight`],
    ["Target", about.target],
    ["Context", `${about.max_len} tokens`],
    ["Most in a batch", about.max_batch_size],
    embedding
      ? ["Vectors", `${embedding.dimension} values, ${embedding.pooling} pooling`]
      : ["Sampling", defaults.join(", ") || "no defaults of its own"],
    ["icc", about.version],
  ];
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

// -- colours, drawers, keys

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  at("theme").title = `Colours: ${theme === "system" ? "as the system has them" : theme}`;
  store.write("theme", theme);
}

const narrow = () => matchMedia("(max-width: 60rem)").matches;

function setOpen(name, open) {
  at("layout").classList.toggle(`with-${name}`, open);
  at(`${name}-toggle`).setAttribute("aria-expanded", String(open));
  at("shade").hidden =
    !narrow() || !(at("layout").classList.contains("with-chats") || at("layout").classList.contains("with-panel"));
  if (!narrow()) store.write(`with-${name}`, open);
}

function toggle(name) {
  const open = !at("layout").classList.contains(`with-${name}`);
  if (narrow() && open) closeAsides();
  setOpen(name, open);
}

function closeAsides() {
  setOpen("chats", false);
  setOpen("panel", false);
}

function pressed(event) {
  const typing = event.target.closest("input, textarea, select, dialog") !== null;
  if (event.key === "Escape") {
    if (narrow()) closeAsides();
    views[current].stop?.();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const digit = Object.keys(views)[Number(event.code.replace("Digit", "")) - 1];
    const keys = { KeyN: () => views.chat?.new(), KeyR: again, KeyS: () => toggle("panel") };
    const does = digit ? () => (location.hash = digit) : keys[event.code];
    if (!does) return;
    event.preventDefault();
    does();
  } else if (!typing && !event.ctrlKey && !event.metaKey) {
    if (event.key === "?") at("help-dialog").showModal();
    else if (event.key === "/" && current === "chat") at("ask").focus();
    else return;
    event.preventDefault();
  }
}

function again() {
  const last = current === "chat" && path(views.chat.conversation).findLast(({ role }) => role === "assistant");
  if (last) views.chat.act("again", last);
  else if (current === "complete") views.complete.run();
}

for (const name of ["chats", "panel"]) {
  at(`${name}-toggle`).addEventListener("click", () => toggle(name));
  setOpen(name, !narrow() && store.read(`with-${name}`, name === "chats"));
}
at("shade").addEventListener("click", closeAsides);
at("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(store.read("theme", "system")) + 1) % 3]));
at("help").addEventListener("click", () => at("help-dialog").showModal());
matchMedia("(max-width: 60rem)").addEventListener("change", ({ matches }) => {
  if (matches) closeAsides();
  else for (const name of ["chats", "panel"]) setOpen(name, store.read(`with-${name}`, name === "chats"));
});

begin().catch((error) => {
  at("state").dataset.state = "bad";
  at("state").lastChild.textContent = error.message;
});
