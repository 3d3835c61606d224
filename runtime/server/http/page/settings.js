// The panel: the system prompt, tools, how to sample, and the probabilities of tokens.
import { at, h } from "./dom.js";
import { FIELDS, problem, sampling, TOP_LOGPROBS } from "./params.js";
import { readTools } from "./tools.js";

export class Settings {
  // defaults: the engine's own, by the names of fields
  constructor(store, defaults) {
    this.store = store;
    this.values = store.read("sampling", {});
    this.fields = FIELDS.map((field) => this.row(field, defaults[field.name]));
    at("fields").replaceChildren(...this.fields.filter((_, n) => !FIELDS[n].more));
    at("more-fields").replaceChildren(...this.fields.filter((_, n) => FIELDS[n].more));
    const stop = at("stops");
    stop.value = this.values.stop ?? "";
    stop.addEventListener("input", () => this.set("stop", stop.value));
    const logprobs = at("logprobs");
    logprobs.checked = Boolean(this.values.logprobs);
    logprobs.addEventListener("change", () => this.set("logprobs", logprobs.checked));
    this.beginTools();
    at("reset").addEventListener("click", () => {
      this.values = {};
      stop.value = "";
      logprobs.checked = false;
      for (const row of this.fields) row.show("");
      this.store.write("sampling", this.values);
    });
  }

  // The fields of a request; logprobs: how many of the likeliest tokens to report, if any.
  request() {
    return { ...sampling(this.values), ...(this.values.logprobs ? { logprobs: TOP_LOGPROBS } : {}) };
  }

  beginTools() {
    const text = at("tools");
    const choice = at("tool-choice");
    const check = () => {
      const { tools, problem } = readTools(text.value);
      text.setAttribute("aria-invalid", String(problem !== ""));
      at("tools-problem").textContent = problem;
      const names = tools.map((tool) => tool.function.name);
      at("tools-found").textContent = names.length ? `offered: ${names.join(", ")}` : "";
      at("tool-choice-row").hidden = !names.length;
    };
    text.value = this.store.read("tools", "");
    choice.value = this.store.read("tool-choice", "auto");
    text.addEventListener("input", () => (this.store.write("tools", text.value), check()));
    choice.addEventListener("change", () => this.store.write("tool-choice", choice.value));
    check();
  }

  // The fields of a request of a chat that are about tools; an Error where what was pasted is wrong. One that must be
  // called must be so once, not again when its result is there.
  tools(answersResults) {
    const { tools, problem } = readTools(at("tools").value);
    if (problem) throw new Error(`The tools in the settings are wrong: ${problem}`);
    if (!tools.length) return {};
    const choice = at("tool-choice").value;
    return { tools, tool_choice: choice === "required" && answersResults ? "auto" : choice };
  }

  set(name, value) {
    this.values[name] = value;
    this.store.write("sampling", this.values);
  }

  row(field, standard) {
    const id = `field-${field.name}`;
    const input = h("input", {
      id,
      inputmode: field.whole ? "numeric" : "decimal",
      autocomplete: "off",
      "aria-describedby": `${id}-help`,
      placeholder: standard ?? (field.name === "seed" ? "random" : "default"),
    });
    const [low, high, step] = field.slider ?? [];
    const slider =
      field.slider &&
      h("input", {
        type: "range",
        min: low,
        max: high,
        step,
        "aria-label": `${field.label}, as a slider`,
        tabindex: "-1",
      });
    const wrong = h("span", { class: "wrong", role: "alert" });
    const row = h(
      "div",
      { class: "field" },
      h("label", { for: id }, field.label),
      input,
      slider,
      h("small", { id: `${id}-help` }, field.help),
      wrong,
    );
    row.show = (text) => {
      input.value = text;
      if (slider) slider.value = text || (standard ?? (field.name === "min_p" ? 0 : 1));
      row.classList.toggle("set", text !== "");
      wrong.textContent = problem(field, text);
      input.setAttribute("aria-invalid", String(wrong.textContent !== ""));
    };
    const changed = (text) => {
      row.show(text);
      this.set(field.name, text);
    };
    input.addEventListener("input", () => changed(input.value));
    slider?.addEventListener("input", () => changed(slider.value));
    row.show(this.values[field.name] ?? "");
    return row;
  }
}
