import assert from "node:assert/strict";
import { test } from "node:test";
import { parseInline, safeHref } from "../../../../runtime/server/http/page/inline.js";
import { parseMarkdown } from "../../../../runtime/server/http/page/markdown.js";

const marks = { em: "i", strong: "b", del: "s" };
const inline = (nodes) =>
  nodes
    .map(({ type, text, href, children }) => {
      if (type === "text") return text;
      if (type === "code") return `{${text}}`;
      if (type === "break") return "⏎";
      if (type === "link") return `[${inline(children)}→${href}]`;
      return `<${marks[type]}>${inline(children)}</${marks[type]}>`;
    })
    .join("");

for (const [given, wanted] of [
  ["a *b* **c** ***d*** _e_ snake_case_name", "a <i>b</i> <b>c</b> <i><b>d</b></i> <i>e</i> snake_case_name"],
  ["**a *b* c** 2 * 3 * 4", "<b>a <i>b</i> c</b> 2 * 3 * 4"],
  ["**unclosed and *more", "**unclosed and *more"],
  ["foo***bar***baz **foo*", "foo<i><b>bar</b></i>baz *<i>foo</i>"],
  ["`a *b*` ``c`d`` `open", "{a *b*} {c`d} `open"],
  ["a\\*b &amp; &#65;&lt;i&gt; <b>x</b> y<br>z", "a*b & A<i> <b>x</b> y⏎z"],
  ["~~gone~~ ~not~", "<s>gone</s> ~not~"],
  ["two  \nlines\\\nand\none", "two⏎lines⏎and\none"],
  ['[t](https://a.b/c "x") ![p](https://a.b/p.png)', "[t→https://a.b/c] [p→https://a.b/p.png]"],
  [
    "[x](javascript:alert(1)) [y](/here) [z](data:text/html,a)",
    "[x](javascript:alert(1)) [y](/here) [z](data:text/html,a)",
  ],
  [
    "see https://a.b/c_(d)), and http://x.y.",
    "see [https://a.b/c_(d)→https://a.b/c_(d)]), and [http://x.y→http://x.y/].",
  ],
  ["[**b** *c*](https://x.y/)", "[<b>b</b> <i>c</i>→https://x.y/]"],
]) {
  test(`inline: ${given.slice(0, 40)}`, () => assert.equal(inline(parseInline(given)), wanted));
}

const block = (node) =>
  ({
    paragraph: () => `p(${inline(node.inline)})`,
    heading: () => `h${node.level}(${inline(node.inline)})`,
    code: () => `code(${node.lang}${node.open ? "…" : ""}|${node.text})`,
    quote: () => `quote(${blocks(node.blocks)})`,
    rule: () => "rule",
    list: () =>
      `${node.ordered ? `ol${node.start}` : "ul"}${node.tight ? "" : "~"}(${node.items
        .map(({ done, blocks: own }) => `${{ true: "☑", false: "☐" }[done] ?? ""}${blocks(own)}`)
        .join("; ")})`,
    table: () => `table(${node.align}|${[node.head, ...node.rows].map((row) => row.map(inline).join(",")).join("/")})`,
    reasoning: () => `thought${node.open ? "…" : ""}(${blocks(node.blocks)})`,
  })[node.type]();
const blocks = (nodes) => nodes.map(block).join(" ");

for (const [given, wanted] of [
  ["# A\ntext\nmore\n\n## B ##\nx", "h1(A) p(text\nmore) h2(B) p(x)"],
  ["Title\n===\nx\n---\n***", "h1(Title) h2(x) rule"],
  ["- a\n- b\n  - c\n    d\n- e", "ul(p(a); p(b) ul(p(c\nd)); p(e))"],
  ["1. one\n2. two\n   - sub\n\n3. three", "ol1~(p(one); p(two) ul(p(sub)); p(three))"],
  ["10. ten\n11. eleven\n\nafter", "ol10(p(ten); p(eleven)) p(after)"],
  ["1. a:\n\n   ```py\n   x = 1\n\n   y\n   ```\n2. b", "ol1~(p(a:) code(py|x = 1\n\ny); p(b))"],
  ["- [ ] todo\n- [x] done", "ul(☐p(todo); ☑p(done))"],
  ["```python\ndef f():\n    pass", "code(python…|def f():\n    pass)"],
  ["~~~js\n```\n~~~\nafter", "code(js|```) p(after)"],
  ["text\n```\nx\n```", "p(text) code(|x)"],
  ["| a | b | c |\n|:--|:-:|--:|\n| 1 | `x|y` | 3 \\| 4 |\n| 5 |", "table(left,center,right|a,b,c/1,{x|y},3 | 4/5,,)"],
  ["text | with pipe\nno table", "p(text | with pipe\nno table)"],
  ["> q\n> - l\nlazy\n\nend", "quote(p(q) ul(p(l\nlazy))) p(end)"],
  ["<think>\nhm *so*\n</think>\n\nAnswer", "thought(p(hm <i>so</i>)) p(Answer)"],
  ["<think>a</think>B", "thought(p(a)) p(B)"],
  ["<think>still", "thought…(p(still))"],
]) {
  test(`blocks: ${given.slice(0, 40).replaceAll("\n", "⏎")}`, () => assert.equal(blocks(parseMarkdown(given)), wanted));
}

test("blocks know their source, so that only what changed is drawn again", () => {
  const [first, second] = parseMarkdown("one\ntwo\n\n- a\n- b\n");
  assert.deepEqual([first.source, second.source.trim()], ["one\ntwo", "- a\n- b"]);
  const grown = parseMarkdown("one\ntwo\n\n- a\n- b\n- c");
  assert.equal(grown[0].source, first.source);
  assert.notEqual(grown[1].source, second.source);
});

test("only the web and mail are safe to follow", () => {
  for (const href of ["javascript:1", "data:,x", "file:///x", "vbscript:x", " java\nscript:1", "/x", "x", ""])
    assert.equal(safeHref(href), null, href);
  assert.equal(safeHref("https://a.b"), "https://a.b/");
});

test("long and hostile texts are read whole", () => {
  for (const unit of [
    "*a ",
    "**b _c ",
    "[",
    "[a](",
    "`a``",
    "~~a ",
    "> ",
    "- a\n",
    "```\n",
    "|a|b|\n|-|-|\n",
    "<",
    "&",
    "h",
    "](",
  ]) {
    const tree = JSON.stringify(parseMarkdown(unit.repeat(5000)).map(({ source, ...rest }) => rest));
    assert.ok(tree.length > 100, unit);
  }
  assert.ok(parseMarkdown(Array.from({ length: 500 }, (_, n) => `${" ".repeat(2 * n)}- x`).join("\n")).length);
});
