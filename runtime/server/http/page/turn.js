// One turn of a conversation on the page: its text, what can be done with it, and how fast it came.
import { callCards, resultCards, resultsForm } from "./calls.js";
import { statsLine } from "./chunks.js";
import { SPEAKERS } from "./conversation.js";
import { copyButton, growing, h, icon, iconButton } from "./dom.js";
import { reasoning, renderMarkdown } from "./render.js";
import { renderTokens, tokenList } from "./tokens.js";
import { whole } from "./tools.js";

const CUT = new Set(["length", "stopped"]); // ends of answers that can be gone on with

// `act(name, turn, value)` is what the buttons call: "edit", "again", "on", "remove", "version", "results".
export class TurnView {
  constructor(turn, act) {
    this.turn = turn;
    this.act = act;
    this.asTokens = false;
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    this.element = h(
      "article",
      { class: `turn ${turn.role}`, "aria-label": SPEAKERS[turn.role], "data-id": turn.id },
      this.body,
      this.foot,
    );
  }

  // Shows the turn as it is now. place: {index, count} among its versions; last: nothing is behind it.
  draw(place) {
    const { turn } = this;
    this.element.classList.toggle("live", Boolean(turn.live));
    if (turn.role === "user") this.body.replaceChildren(h("div", { class: "said" }, turn.content));
    else if (turn.role === "tool") this.body.replaceChildren(...resultCards(turn.results));
    else this.drawAnswer(place.last);
    this.drawFoot(place);
  }

  drawAnswer(last) {
    const { turn } = this;
    if (this.asTokens && turn.tokens?.length) {
      this.list ??= tokenList();
      renderTokens(this.list, turn.tokens);
      if (this.body.firstChild !== this.list) this.body.replaceChildren(this.list);
      return;
    }
    this.said ??= h("div", { class: "said markdown" });
    if (!this.body.contains(this.said)) this.body.replaceChildren(this.said);
    if (turn.thought) this.drawThought();
    renderMarkdown(this.said, turn.content);
    this.drawCalls(last);
    this.wait ??= h("p", { class: "waiting", "aria-label": "Waiting for the first token" }, h("i"), h("i"), h("i"));
    this.wait.remove();
    this.problem?.remove();
    if (turn.live && !turn.content && !turn.thought && !turn.calls) this.body.append(this.wait);
    if (turn.error) {
      const again = h("button", { type: "button", onclick: () => this.act("again", turn) }, "Try again");
      this.problem = h("div", { class: "problem", role: "alert" }, h("span", {}, turn.error), again);
      this.body.append(this.problem);
    }
  }

  // The calls of tools, and as long as nothing follows, fields for their results.
  drawCalls(last) {
    const { turn } = this;
    if (!turn.calls) return;
    this.calls ??= h("div", { class: "calls" });
    if (!this.body.contains(this.calls)) this.said.after(this.calls);
    const calls = whole(turn.calls);
    const asks = last && !turn.live && !turn.error && calls.length > 0;
    if (asks) this.results ??= resultsForm(calls, null, (results) => this.act("results", turn, results));
    this.calls.replaceChildren(...callCards(turn.calls, turn.live), ...(asks ? [this.results] : []));
  }

  drawThought() {
    const open = Boolean(this.turn.live) && !this.turn.content;
    if (!this.thought) {
      this.thinking = h("div", { class: "markdown" });
      this.thought = reasoning([this.thinking], open);
      this.body.prepend(this.thought);
    }
    if (!open && this.wasOpen) this.thought.open = false;
    this.thought.firstChild.textContent = open ? "Thinking …" : "Reasoning";
    this.wasOpen = open;
    renderMarkdown(this.thinking, this.turn.thought);
  }

  drawFoot({ index, count, last }) {
    const { turn, act } = this;
    const stats = turn.stats ? statsLine(turn.stats, turn.finish) : [];
    const line = h(
      "span",
      { class: "stats" },
      stats.map(({ label, title }) => h("span", { title }, label)),
    );
    if (turn.live) {
      if (this.foot.firstChild?.className === "stats") this.foot.firstChild.replaceWith(line);
      else this.foot.replaceChildren(line);
      return;
    }
    const others =
      count > 1 &&
      h(
        "span",
        { class: "versions" },
        iconButton("left", "Earlier version", () => act("version", turn, -1), { disabled: index === 0 }),
        h("span", {}, `${index + 1}/${count}`),
        iconButton("right", "Later version", () => act("version", turn, 1), { disabled: index === count - 1 }),
      );
    const answer = turn.role === "assistant";
    const tokens =
      answer &&
      turn.tokens?.length > 0 &&
      iconButton(
        "tokens",
        "Probabilities of the tokens",
        () => {
          this.asTokens = !this.asTokens;
          this.draw({ index, count, last });
        },
        { "aria-pressed": String(this.asTokens) },
      );
    const buttons = h(
      "span",
      { class: "actions" },
      others,
      copyButton(() => asText(turn), "Copy the text"),
      tokens,
      iconButton("edit", "Edit", () => this.edit()),
      answer && iconButton("again", "Another answer", () => act("again", turn)),
      answer &&
        turn.content &&
        CUT.has(turn.finish) &&
        iconButton("on", "Go on with this answer", () => act("on", turn)),
      iconButton("bin", "Delete from here on", () => act("remove", turn)),
    );
    this.foot.replaceChildren(line, buttons);
  }

  // Puts a text area in the place of the text until it is sent, saved or given up.
  edit() {
    const { turn, act } = this;
    if (turn.role === "tool") return this.editResults();
    const area = h("textarea", { class: "edit", "aria-label": "Text of this turn" });
    area.value = turn.content;
    const end = (send) => {
      this.element.classList.remove("editing");
      this.said = this.thought = this.list = undefined;
      if (send && area.value.trim() && area.value !== turn.content) act("edit", turn, area.value);
      else act("redraw", turn);
    };
    const done = h(
      "button",
      { type: "button", class: "primary", onclick: () => end(true) },
      turn.role === "user" ? "Send" : "Save",
    );
    const cancel = h("button", { type: "button", onclick: () => end(false) }, "Cancel");
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end(false);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) end(true);
      event.stopPropagation();
    });
    this.element.classList.add("editing");
    this.body.replaceChildren(
      area,
      h("div", { class: "row" }, done, cancel, h("small", {}, "the version before stays")),
    );
    this.foot.replaceChildren();
    growing(area)();
    area.focus();
  }

  // Other results in the place of those that were given; the ones before stay as a version.
  editResults() {
    const { turn } = this;
    const end = (name, value) => {
      this.element.classList.remove("editing");
      this.act(name, turn, value);
    };
    const send = (results) => end("results", results);
    const form = resultsForm(turn.results, turn.results, send, () => end("redraw"));
    this.element.classList.add("editing");
    this.body.replaceChildren(form);
    this.foot.replaceChildren();
    form.querySelector("textarea").focus();
  }
}

// What is copied of a turn: its text, else its calls or results.
function asText({ content, calls, results }) {
  const called = calls?.map(({ name, arguments: text }) => `${name}(${text})`);
  return content || (called ?? results?.map((result) => result.content) ?? []).join("\n");
}

// What an empty conversation shows.
export function welcome(about, ask) {
  const facts = [
    about.architecture,
    about.quantization !== "none" && about.quantization,
    about.target,
    `${about.max_len} tokens of context`,
  ];
  const ideas = [
    "Explain a paged KV cache to a programmer, in a few sentences.",
    "Write a Python function that merges two sorted lists.",
    "Make a table of three sorting algorithms and their costs.",
  ];
  return h(
    "div",
    { class: "welcome" },
    h("h2", {}, about.model),
    h("p", {}, facts.filter(Boolean).join(" · ")),
    h(
      "div",
      { class: "ideas" },
      ideas.map((text) => h("button", { type: "button", onclick: () => ask(text) }, text, icon("up"))),
    ),
  );
}
