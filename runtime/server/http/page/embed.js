// Embeddings: the vectors of some texts, and how alike they are.
import { json } from "./api.js";
import { duration } from "./chunks.js";
import { at, copyButton, growing, h, iconButton } from "./dom.js";
import { cosine, norm } from "./vectors.js";

const EXAMPLES = ["A cat sleeps on the sofa.", "The kitten is napping.", "Interest rates rose again."];
const FIRST_VALUES = 6;

export class Embed {
  constructor({ store, about }) {
    Object.assign(this, { store, about });
    for (const text of store.read("texts", EXAMPLES)) this.add(text);
    at("add-text").addEventListener("click", () => this.add("").focus());
    at("embed-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
  }

  shown() {
    for (const area of this.areas) area.dispatchEvent(new Event("input"));
  }

  stop() {}

  get areas() {
    return [...at("texts").querySelectorAll("textarea")];
  }

  add(text) {
    const area = h("textarea", { rows: 1, "aria-label": "A text" });
    area.value = text;
    const fit = growing(area);
    area.addEventListener("input", () =>
      this.store.write(
        "texts",
        this.areas.map(({ value }) => value),
      ),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.run();
    });
    const row = h(
      "li",
      {},
      h("span", { class: "number" }),
      area,
      iconButton("close", "Remove this text", () => row.remove()),
    );
    at("texts").append(row);
    fit();
    return area;
  }

  async run() {
    const texts = this.areas.map(({ value }) => value).filter((value) => value.trim());
    const out = at("vectors");
    if (!texts.length) return;
    at("embed-run").disabled = true;
    const begun = performance.now();
    try {
      const answer = await json("v1/embeddings", { model: this.about.model, input: texts, encoding_format: "float" });
      const vectors = answer.data.map(({ embedding }) => embedding);
      const line = `${vectors.length} × ${vectors[0].length} values from ${answer.usage.prompt_tokens} tokens in ${duration(performance.now() - begun)}`;
      out.replaceChildren(
        h("h2", {}, "Cosine similarity"),
        matrix(texts, vectors),
        h("p", { class: "stats" }, line),
        list(texts, vectors),
      );
    } catch (error) {
      out.replaceChildren(h("div", { class: "problem", role: "alert" }, error.message));
    }
    at("embed-run").disabled = false;
  }
}

function matrix(texts, vectors) {
  const head = h(
    "tr",
    {},
    h("td"),
    texts.map((text, n) => h("th", { scope: "col", title: text }, n + 1)),
  );
  const rows = texts.map((text, row) => {
    const cells = vectors.map((other) => {
      const alike = cosine(vectors[row], other);
      const cell = h("td", { class: "alike" }, alike.toFixed(3));
      cell.style.setProperty("--share", Math.max(0, alike).toFixed(4));
      return cell;
    });
    return h("tr", {}, h("th", { scope: "row", title: text }, h("b", {}, row + 1), ` ${text}`), cells);
  });
  return h("div", { class: "table" }, h("table", { class: "matrix" }, head, rows));
}

function list(texts, vectors) {
  return h(
    "ol",
    { class: "vectors" },
    vectors.map((vector, n) => {
      const start = vector
        .slice(0, FIRST_VALUES)
        .map((value) => value.toPrecision(3))
        .join(", ");
      return h(
        "li",
        {},
        h("div", { class: "text" }, texts[n]),
        h(
          "div",
          { class: "values" },
          h("code", {}, `[${start}, …]`),
          h("span", {}, `length ${norm(vector).toFixed(4)}`),
          copyButton(() => JSON.stringify(vector), "Copy the vector"),
        ),
      );
    }),
  );
}
