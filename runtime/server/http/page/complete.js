// Completion of a text as it stands: for models without a chat template, and to look at what a prompt does.
import { generate } from "./api.js";
import { statsLine } from "./chunks.js";
import { at, copyButton, growing, h, oncePerFrame } from "./dom.js";
import { renderTokens, tokenList } from "./tokens.js";

export class Complete {
  constructor({ store, about, request }) {
    Object.assign(this, { store, about, request });
    this.prompt = at("prompt");
    this.prompt.value = store.read("prompt", "");
    this.fit = growing(this.prompt);
    this.text = "";
    this.tokens = [];
    this.drawSoon = oncePerFrame(() => this.draw());
    this.prompt.addEventListener("input", () => store.write("prompt", this.prompt.value));
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.run();
    });
    at("complete-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    at("complete-stop").addEventListener("click", () => this.stop());
    at("append").addEventListener("click", () => this.append());
    at("as-tokens").addEventListener("change", () => this.draw());
    at("complete-copy").replaceWith(copyButton(() => this.text, "Copy the completion"));
  }

  shown() {
    this.fit();
    this.prompt.focus();
  }

  stop() {
    this.controller?.abort();
  }

  // The completion becomes a part of the prompt, so that it can be gone on with.
  append() {
    this.prompt.value += this.text;
    this.store.write("prompt", this.prompt.value);
    Object.assign(this, { text: "", tokens: [], stats: null });
    this.fit();
    this.draw();
    this.prompt.focus();
  }

  async run() {
    if (this.controller || !this.prompt.value) return;
    Object.assign(this, {
      text: "",
      tokens: [],
      stats: null,
      finish: null,
      problem: "",
      controller: new AbortController(),
    });
    this.draw();
    try {
      const body = { model: this.about.model, prompt: this.prompt.value, max_tokens: 256, ...this.request() };
      const { finish, stats } = await generate("v1/completions", body, this.controller.signal, (piece, stats) => {
        this.text += piece.text;
        this.tokens.push(...piece.tokens);
        this.stats = stats;
        this.drawSoon();
      });
      Object.assign(this, { finish, stats });
    } catch (error) {
      this.problem = error.message;
    }
    this.controller = null;
    this.draw();
  }

  draw() {
    const running = Boolean(this.controller);
    at("complete-run").hidden = running;
    at("complete-stop").hidden = !running;
    at("complete-out").hidden = !running && !this.text && !this.problem;
    at("append").disabled = running || !this.text;
    at("as-tokens").disabled = !this.tokens.length;
    const out = at("completion");
    out.classList.toggle("live", running);
    if (at("as-tokens").checked && this.tokens.length) {
      this.list ??= tokenList();
      renderTokens(this.list, this.tokens);
      if (out.firstChild !== this.list) out.replaceChildren(this.list);
    } else out.textContent = this.text;
    if (this.problem) out.append(h("div", { class: "problem", role: "alert" }, this.problem));
    const parts = this.stats ? statsLine(this.stats, this.finish) : [];
    at("complete-stats").replaceChildren(...parts.map(({ label, title }) => h("span", { title }, label)));
  }
}
