// The chat: the conversation that is shown, its turns, and answers as they come.
import { generate } from "./api.js";
import { addTurn, messages, newConversation, path, removeTurn, turnTo, versions } from "./conversation.js";
import { at, growing, h, oncePerFrame } from "./dom.js";
import { addCalls } from "./tools.js";
import { TurnView, welcome } from "./turn.js";

const SAVE_MS = 2000;

export class Chat {
  // request(), tools(): the fields of a request from the panel; changed(): a conversation came, went or has another title
  constructor({ store, about, request, tools, changed }) {
    Object.assign(this, { store, about, request, tools, changed });
    this.running = new Map(); // id of a conversation -> the AbortController of its answer
    this.views = new Map(); // id of a turn -> TurnView
    this.follow = true; // whether the end is kept in view
    this.log = at("log");
    this.input = at("ask");
    this.fit = growing(this.input);
    this.drawSoon = oncePerFrame(() => this.draw());
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    at("stop").addEventListener("click", () => this.stop());
    at("to-end").addEventListener("click", () => this.toEnd());
    this.log.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.input.addEventListener("keydown", (event) => this.pressed(event));
    this.open(store.load(store.read("open", "")) ?? newConversation(store.read("system", "")));
  }

  open(conversation) {
    this.conversation = this.running.get(conversation.id)?.conversation ?? conversation;
    this.store.write("open", this.conversation.id);
    at("system").value = this.conversation.system;
    this.views.clear();
    this.follow = true;
    this.log.replaceChildren();
    this.draw();
    this.changed();
  }

  new() {
    this.open(newConversation(this.store.read("system", "")));
    this.input.focus();
  }

  setSystem(text) {
    this.conversation.system = text;
    this.store.write("system", text);
    if (this.conversation.leaf) this.store.save(this.conversation);
  }

  // -- drawing

  draw() {
    const { conversation } = this;
    const turns = path(conversation);
    const elements = turns.map((turn) => {
      let view = this.views.get(turn.id);
      if (!view) this.views.set(turn.id, (view = new TurnView(turn, (...asked) => this.act(...asked))));
      const all = versions(conversation, turn.id);
      const last = turn === turns.at(-1);
      const same = view.drawn && view.count === all.length && view.last === last;
      if (!view.element.classList.contains("editing") && (turn.live || !same)) {
        view.draw({ index: all.indexOf(turn), count: all.length, last });
        Object.assign(view, { drawn: !turn.live, count: all.length, last });
      }
      return view.element;
    });
    if (!turns.length) elements.push(welcome(this.about, (text) => this.send(text)));
    const shown = [...this.log.children];
    if (shown.length !== elements.length || shown.some((element, n) => element !== elements[n]))
      this.log.replaceChildren(...elements);
    this.log.setAttribute("aria-busy", String(this.running.has(conversation.id)));
    at("send").hidden = this.running.has(conversation.id);
    at("stop").hidden = !this.running.has(conversation.id);
    if (this.follow) this.toEnd();
    else this.scrolled();
  }

  redraw(turn) {
    const view = this.views.get(turn.id);
    if (view) view.drawn = false;
    this.drawSoon();
  }

  scrolled() {
    const gap = this.log.scrollHeight - this.log.clientHeight - this.log.scrollTop;
    this.follow = gap < 40;
    at("to-end").hidden = this.follow;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
    this.scrolled();
  }

  // -- what is done

  pressed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      const last = path(this.conversation).findLast(({ role }) => role === "user");
      if (last && !this.running.has(this.conversation.id)) {
        event.preventDefault();
        this.views.get(last.id).edit();
      }
    }
  }

  send(given) {
    const text = given ?? this.input.value;
    if (!text.trim() || this.running.has(this.conversation.id)) return;
    if (given === undefined) {
      this.input.value = "";
      this.fit();
    }
    const turn = addTurn(this.conversation, this.conversation.leaf, "user", text);
    this.answer(turn.id);
  }

  act(name, turn, value) {
    const { conversation } = this;
    if (name === "redraw") return this.redraw(turn);
    if (this.running.has(conversation.id)) return;
    if (name === "again") return this.answer(turn.parent);
    if (name === "on") return this.answer(turn.parent, turn);
    if (name === "version") turnTo(conversation, turn.id, value);
    if (name === "remove") removeTurn(conversation, turn.id);
    if (name === "results") {
      // of the calls of an answer, or other results in the place of these
      const given = addTurn(conversation, turn.role === "tool" ? turn.parent : turn.id, "tool");
      return this.answer(Object.assign(given, { results: value }).id);
    }
    if (name === "edit") {
      this.redraw(turn);
      const edited = addTurn(conversation, turn.parent, turn.role, value);
      if (turn.role === "user") return this.answer(edited.id);
    }
    this.store.save(conversation);
    for (const view of this.views.values()) view.drawn = false; // others may have become versions of each other
    this.draw();
    this.changed();
  }

  stop() {
    this.running.get(this.conversation.id)?.controller.abort();
  }

  // The request for an answer behind a turn; for the rest of an answer that ends too early: goesOn is its own turn.
  body(parent, goesOn) {
    const given = messages(this.conversation, goesOn ? goesOn.id : parent);
    const { logprobs, ...fields } = this.request();
    const tokens = logprobs ? { logprobs: true, top_logprobs: logprobs } : {};
    const rest = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
    const tools = this.tools(given.at(-1)?.role === "tool");
    return { model: this.about.model, messages: given, ...fields, ...tools, ...tokens, ...rest };
  }

  // Asks for an answer, and shows it as it comes, if its conversation is still the one that is shown.
  async answer(parent, goesOn = null) {
    const { conversation } = this;
    if (goesOn) delete goesOn.error; // what is there of it is sent all the same
    const turn = goesOn ?? addTurn(conversation, parent, "assistant");
    Object.assign(turn, { live: true, finish: null, tokens: turn.tokens ?? [] });
    const controller = new AbortController();
    this.running.set(conversation.id, { controller, conversation });
    this.follow = true;
    for (const view of this.views.values()) view.drawn = false;
    this.draw();
    this.save(conversation);
    let saved = performance.now();
    try {
      const body = this.body(parent, goesOn);
      const { finish, stats } = await generate("v1/chat/completions", body, controller.signal, (piece, stats) => {
        turn.content += piece.text;
        if (piece.thought) turn.thought = (turn.thought ?? "") + piece.thought;
        if (piece.calls.length) addCalls((turn.calls ??= []), piece.calls);
        turn.tokens.push(...piece.tokens);
        turn.stats = stats;
        if (performance.now() - saved > SAVE_MS) saved = (this.save(conversation), performance.now());
        if (conversation === this.conversation) this.drawSoon();
      });
      Object.assign(turn, { finish, stats });
    } catch (error) {
      turn.error = error.message;
    }
    delete turn.live;
    this.running.delete(conversation.id);
    conversation.changed = Date.now();
    this.save(conversation);
    if (conversation === this.conversation) this.redraw(turn);
    this.announce(turn);
  }

  save(conversation) {
    if (conversation.removed) return; // while it was being answered
    at("storage-problem").hidden = this.store.save(conversation);
    this.changed();
  }

  // For screen readers: the whole answer once, not every piece of it.
  announce({ content, error, calls }) {
    const called = calls?.length ? `calls ${calls.map(({ name }) => name).join(", ")}` : "";
    at("announcer").replaceChildren(h("p", {}, error ?? [content, called].filter(Boolean).join(" ")));
  }
}
