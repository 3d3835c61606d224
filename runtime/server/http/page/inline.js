// Markdown inside a paragraph: text -> a tree of plain objects, in time linear in the text. No HTML is let through.
//
// Nodes: {type: "text" | "code", text}, {type: "em" | "strong" | "del", children}, {type: "link", href, children},
// {type: "break"}. The rules of emphasis are CommonMark's; ~~strikes~~ and bare addresses are GitHub's.

const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  ndash: "–",
  mdash: "—",
  hellip: "…",
};
const PUNCTUATION = /[\p{P}\p{S}]/u;
const MOST_LINK_CHARS = 2048;
const TARGET = /\(\s{0,9}(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s{1,9}(?:"[^"]*"|'[^']*'))?\s{0,9}\)/y;

// What a character may begin, as the method that reads it.
const READERS = {
  "\\": "escape",
  "`": "code",
  "&": "entity",
  "<": "angle",
  "[": "open",
  "!": "image",
  "]": "close",
  "\n": "newline",
  "*": "run",
  _: "run",
  "~": "run",
  h: "address",
};

// An address that is safe to follow, or null: only the web and mail, never a script or a file.
export function safeHref(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

export function parseInline(text) {
  return new Scanner(text).nodes();
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = ""; // text that is not a node yet
    this.found = []; // nodes, and the delimiters of emphasis
    this.brackets = []; // where in `found` those are that are open
    this.unclosed = new Set(); // lengths of runs of backticks that no later run closes
  }

  nodes() {
    while (this.at < this.text.length) {
      const reader = READERS[this.text[this.at]];
      if (!reader || !this[reader]()) this.rest();
    }
    this.flush();
    return paired(this.found);
  }

  // Each reader takes what begins here and returns true, or leaves it as text and returns false.

  rest() {
    const end = this.at + 1 + this.match(/[^\\`&<[\]!\n*_~h]*/y, this.at + 1)[0].length;
    this.plain += this.text.slice(this.at, end);
    this.at = end;
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") return this.take(2, { type: "break" });
    return /[!-/:-@[-`{-~]/.test(next) && this.takeText(2, next);
  }

  code() {
    const run = this.match(/`+/y)[0];
    const from = this.at + run.length;
    let end = this.unclosed.has(run.length) ? -1 : this.text.indexOf(run, from);
    while (end >= 0) {
      const length = this.match(/`+/y, end)[0].length;
      if (length === run.length) break;
      end = this.text.indexOf(run, end + length);
    }
    if (end < 0) {
      this.unclosed.add(run.length);
      return this.takeText(run.length, run);
    }
    const inside = this.text.slice(from, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
    return this.take(end + run.length - this.at, { type: "code", text: padded ? inside.slice(1, -1) : inside });
  }

  entity() {
    const found = this.match(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,6}));/y);
    if (!found) return false;
    const code = found[1] ? Number(found[1]) : parseInt(found[2] ?? "0", 16);
    const char = found[3] ? ENTITIES[found[3]] : code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
    return char !== undefined && this.takeText(found[0].length, char);
  }

  angle() {
    const broken = this.match(/<br\s{0,9}\/?>/iy);
    if (broken) return this.take(broken[0].length, { type: "break" });
    const link = this.match(/<([a-z][a-z0-9+.-]{1,31}:[^\s<>]{1,2048})>/iy);
    return link !== null && this.link(link[1], link[0].length);
  }

  address() {
    if (/[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? "")) return false;
    const found = this.match(/https?:\/\/[^\s<>"'`\\|]{1,2048}/y);
    if (!found) return false;
    let shown = found[0].replace(/[.,:;!?*_~]+$/, "");
    while (shown.endsWith(")") && shown.split(")").length > shown.split("(").length) shown = shown.slice(0, -1);
    return this.link(shown, shown.length);
  }

  newline() {
    const hard = this.plain.endsWith("  ");
    this.plain = this.plain.trimEnd();
    return hard ? this.take(1, { type: "break" }) : this.takeText(1, "\n");
  }

  open(text = "[") {
    this.flush();
    this.brackets.push(this.found.length);
    return this.take(text.length, { type: "text", text });
  }

  image() {
    return this.text[this.at + 1] === "[" && this.open("![");
  }

  // "](address)" makes a link of what stands since the last bracket; without an address to follow it stays text.
  close() {
    const open = this.brackets.pop();
    if (open === undefined) return false;
    const target = this.text[this.at + 1] === "(" ? this.match(TARGET, this.at + 1, MOST_LINK_CHARS) : null;
    const href = target && safeHref((target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    if (!href) return false;
    this.flush();
    const inside = paired(this.found.splice(open).slice(1));
    const children = inside.length ? inside : [{ type: "text", text: href }];
    return this.take(1 + target[0].length, { type: "link", href, children });
  }

  run() {
    const [run] = this.match(/\*+|_+|~+/y);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + run.length] ?? " ";
    const [spaceBefore, spaceAfter] = [before, after].map((char) => /\s/.test(char));
    const [signBefore, signAfter] = [before, after].map((char) => PUNCTUATION.test(char));
    const left = !spaceAfter && (!signAfter || spaceBefore || signBefore);
    const right = !spaceBefore && (!signBefore || spaceAfter || signAfter);
    const word = run[0] === "_"; // which does nothing inside words
    const opens = left && (!word || !right || signBefore);
    const closes = right && (!word || !left || signAfter);
    if (run[0] === "~" && run.length !== 2) return this.takeText(run.length, run);
    return this.take(run.length, { delimiter: run[0], count: run.length, length: run.length, opens, closes });
  }

  // -- what readers are made of

  match(pattern, at = this.at, most = Infinity) {
    if (most < Infinity && this.text.length > at + most) {
      pattern.lastIndex = 0;
      return pattern.exec(this.text.slice(at, at + most));
    }
    pattern.lastIndex = at;
    return pattern.exec(this.text);
  }

  flush() {
    if (this.plain) this.found.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  take(length, node) {
    this.flush();
    this.found.push(node);
    this.at += length;
    return true;
  }

  takeText(length, text) {
    this.plain += text;
    this.at += length;
    return true;
  }

  link(shown, length) {
    const href = safeHref(shown);
    return href !== null && this.take(length, { type: "link", href, children: [{ type: "text", text: shown }] });
  }
}

// Nodes whose delimiters are paired, innermost first; what has no partner is text.
function paired(nodes) {
  const out = [];
  const openers = []; // where in `out` delimiters are that may open
  const barren = {}; // by kind of closer: so many of the first openers do not go with it
  for (const node of nodes) {
    if (node.delimiter && node.closes) close(node, out, openers, barren);
    if (node.delimiter && !node.count) continue;
    if (node.delimiter && node.opens) openers.push(out.length);
    out.push(node);
  }
  return merged(out);
}

function close(closer, out, openers, barren) {
  const kind = `${closer.delimiter}${closer.opens}${closer.length % 3}`;
  while (closer.count) {
    let at = openers.length - 1;
    while (at >= (barren[kind] ?? 0) && !fits(out[openers[at]], closer)) at--;
    if (at < (barren[kind] ?? 0)) {
      barren[kind] = openers.length;
      return;
    }
    const index = openers[at];
    const opener = out[index];
    const width = opener.count > 1 && closer.count > 1 ? 2 : 1;
    const children = merged(out.splice(index + 1));
    opener.count -= width;
    closer.count -= width;
    openers.length = opener.count ? at + 1 : at;
    for (const known in barren) barren[known] = Math.min(barren[known], openers.length);
    if (!opener.count) out.pop();
    out.push({ type: closer.delimiter === "~" ? "del" : width === 2 ? "strong" : "em", children });
  }
}

function fits(opener, closer) {
  if (opener.delimiter !== closer.delimiter) return false;
  const either = opener.closes || closer.opens; // CommonMark's rule of three
  return !either || (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

// Neighbouring texts as one, with the delimiters that are left.
function merged(nodes) {
  const out = [];
  for (const node of nodes) {
    const text = node.delimiter ? node.delimiter.repeat(node.count) : node.type === "text" ? node.text : null;
    if (text === null) out.push(node);
    else if (out.at(-1)?.type === "text") out[out.length - 1] = { type: "text", text: out.at(-1).text + text };
    else out.push({ type: "text", text });
  }
  return out;
}
