// Markdown trees as elements. While an answer grows, only the blocks that changed are made anew.
import { copyButton, h } from "./dom.js";
import { highlight } from "./highlight.js";
import { parseMarkdown } from "./markdown.js";

// Shows `text` in `element`; what is there already of the same source stays, with its selection and its scroll.
export function renderMarkdown(element, text) {
  const blocks = parseMarkdown(text);
  const shown = element.markdownSources ?? [];
  let same = 0;
  while (same < blocks.length && shown[same] === blocks[same].source) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map(block));
  element.markdownSources = blocks.map(({ source }) => source);
}

const BLOCKS = {
  paragraph: ({ inline }) => h("p", {}, spans(inline)),
  heading: ({ level, inline }) => h(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, spans(inline)),
  rule: () => h("hr"),
  quote: ({ blocks }) => h("blockquote", {}, blocks.map(block)),
  code: codeBlock,
  list: ({ ordered, start, tight, items }) =>
    h(
      ordered ? "ol" : "ul",
      { start: ordered && start !== 1 ? start : null },
      items.map((item) => listItem(item, tight)),
    ),
  table: ({ align, head, rows }) => {
    const cell = (tag) => (inline, n) => h(tag, { class: align[n] && `to-${align[n]}` }, spans(inline));
    const body = rows.map((row) => h("tr", {}, row.map(cell("td"))));
    return h(
      "div",
      { class: "table" },
      h("table", {}, h("thead", {}, h("tr", {}, head.map(cell("th")))), h("tbody", {}, body)),
    );
  },
  reasoning: ({ blocks, open }) => reasoning(blocks.map(block), open),
};

const block = (node) => BLOCKS[node.type](node);

// What the model thought, folded away once it has begun to answer.
export function reasoning(children, open) {
  const details = h("details", { class: "reasoning", open }, h("summary", {}, open ? "Thinking …" : "Reasoning"));
  details.append(h("div", {}, children));
  return details;
}

function codeBlock({ lang, text }) {
  const code = h(
    "code",
    {},
    highlight(text, lang).map(({ kind, text }) => (kind ? h("span", { class: `c-${kind}` }, text) : text)),
  );
  const bar = h(
    "div",
    { class: "code-bar" },
    h("span", {}, lang || "text"),
    copyButton(() => text, "Copy the code"),
  );
  return h("div", { class: "code" }, bar, h("pre", { tabindex: "0" }, code));
}

function listItem({ done, blocks }, tight) {
  const [first, ...rest] = blocks;
  const lead = tight && first?.type === "paragraph" ? spans(first.inline) : first ? [block(first)] : [];
  const box = done === null ? null : h("input", { type: "checkbox", disabled: true, checked: done });
  const others = rest.map((node) => (tight && node.type === "paragraph" ? spans(node.inline) : block(node)));
  return h("li", { class: done === null ? null : "task" }, box, lead, others);
}

const SPANS = {
  text: ({ text }) => text,
  break: () => h("br"),
  code: ({ text }) => h("code", {}, text),
  link: ({ href, children }) =>
    h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, spans(children)),
};

function spans(nodes) {
  return nodes.map((node) => SPANS[node.type]?.(node) ?? h(node.type, {}, spans(node.children)));
}
