// Markdown in blocks: text -> a tree of plain objects. What language models write is what it is for: it also makes
// sense of an answer that is not over, such as a fence that nobody has closed yet.
//
// Blocks: {type: "paragraph" | "heading", inline, level}, {type: "code", lang, text, open}, {type: "quote", blocks},
// {type: "list", ordered, start, tight, items: [{done, blocks}]}, {type: "table", align, head, rows}, {type: "rule"},
// {type: "reasoning", blocks, open}. Blocks of the outermost level have `source`, the lines they were made of.
import { parseInline } from "./inline.js";

const DEEPEST = 12; // of quotes and lists in each other; beyond it they are text
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|\t|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const THINK = /^\s*<(think|thinking|reasoning)>/;

export function parseMarkdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  return parseLines(lines, 0).map(({ from, to, ...block }) => ({ ...block, source: lines.slice(from, to).join("\n") }));
}

// Blocks with the lines [from, to) that they take.
function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) at++;
    else {
      const block =
        reasoning(lines, at, depth) ??
        fence(lines, at) ??
        heading(lines, at) ??
        rule(lines, at) ??
        quote(lines, at, depth) ??
        list(lines, at, depth) ??
        table(lines, at) ??
        paragraph(lines, at);
      blocks.push({ ...block, from: at });
      at = block.to;
    }
  }
  return blocks;
}

function inner(lines, depth) {
  return parseLines(lines, depth + 1).map(({ from, to, ...block }) => block);
}

// What a model thinks aloud before it answers.
function reasoning(lines, at, depth) {
  const found = depth === 0 && THINK.exec(lines[at]);
  if (!found) return null;
  const end = `</${found[1]}>`;
  const said = [lines[at].slice(found[0].length)];
  let to = at + 1;
  while (!said.at(-1).includes(end) && to < lines.length) said.push(lines[to++]);
  const last = said.pop();
  const open = !last.includes(end);
  const [before, after] = open
    ? [last, ""]
    : [last.slice(0, last.indexOf(end)), last.slice(last.indexOf(end) + end.length)];
  if (after.trim()) lines[--to] = after; // the answer begins on the same line
  return { type: "reasoning", open, blocks: inner([...said, before], 1), to };
}

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, indent, mark, info] = found;
  const body = [];
  let to = at + 1;
  let open = true;
  while (to < lines.length) {
    const line = lines[to++];
    const end = FENCE.exec(line);
    if (end && !end[3] && end[2].startsWith(mark)) {
      open = false;
      break;
    }
    body.push(line.replace(new RegExp(`^ {0,${indent.length}}`), ""));
  }
  return {
    type: "code",
    lang: info
      .trim()
      .split(/[\s{,]/)[0]
      .toLowerCase(),
    text: body.join("\n"),
    open,
    to,
  };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  return found && { type: "heading", level: found[1].length, inline: parseInline(found[2] ?? ""), to: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { type: "rule", to: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= DEEPEST) return null;
  const body = [];
  let to = at;
  while (to < lines.length && (QUOTE.test(lines[to]) || (to > at && lines[to].trim() && !begins(lines, to)))) {
    body.push(lines[to++].replace(QUOTE, ""));
  }
  return { type: "quote", blocks: inner(body, depth), to };
}

function list(lines, at, depth) {
  const first = depth < DEEPEST && ITEM.exec(lines[at]);
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let [to, loose] = [at, false];
  while (to < lines.length) {
    const found = ITEM.exec(lines[to]);
    if (!found || /\d/.test(found[2]) !== ordered || found[2].at(-1) !== first[2].at(-1) || RULE.test(lines[to])) break;
    const item = itemLines(lines, to, found);
    const task = /^\[([ xX])\](?:\s|$)/.exec(item.body[0]);
    if (task) item.body[0] = item.body[0].slice(3).trimStart();
    items.push({ done: task ? task[1] !== " " : null, blocks: inner(item.body, depth) });
    loose ||= item.gap || (item.blank && ITEM.test(lines[item.to] ?? ""));
    to = item.to;
  }
  return { type: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, tight: !loose, items, to };
}

// The lines of one item without their indent. gap: a blank line stands between its own blocks; blank: after it.
function itemLines(lines, at, [mark, , , space]) {
  const width = space.length > 4 || !space ? mark.trimEnd().length + 1 : mark.length;
  const body = [lines[at].slice(Math.min(width, lines[at].length))];
  let [to, blank, gap] = [at + 1, false, false];
  for (; to < lines.length; to++) {
    const line = lines[to].replace(/^\t/, "    ");
    if (!line.trim()) {
      blank = true;
      body.push("");
      continue;
    }
    const indent = line.search(/\S/);
    const nested = ITEM.test(line.slice(2)) && indent >= 2; // "  - x" under "1. y" is meant as a part of it
    if (indent >= width || nested) body.push(line.slice(Math.min(indent, width)));
    else if (blank || ITEM.test(line) || begins(lines, to)) break;
    else body.push(line); // a lazy line of its paragraph
    gap ||= blank && body.length > 1;
    blank = false;
  }
  while (body.length > 1 && !body.at(-1)) body.pop();
  return { body, to, blank, gap };
}

function table(lines, at) {
  const top = tableTop(lines, at);
  if (!top) return null;
  const { head, align } = top;
  const rows = [];
  let to = at + 2;
  while (to < lines.length && lines[to].trim() && !begins(lines, to, true)) {
    const row = cells(lines[to++]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row.map(parseInline));
  }
  return { type: "table", align, head: head.map(parseInline), rows, to };
}

// The head of a table and how its columns are aligned, or null where none begins.
function tableTop(lines, at) {
  if (!lines[at].includes("|") || !DIVIDER.test(lines[at + 1] ?? "")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length) return null;
  const sides = { "true,true": "center", "false,true": "right", "true,false": "left", "false,false": null };
  return { head, align: marks.map((mark) => sides[[mark.startsWith(":"), mark.endsWith(":")].join()]) };
}

// The cells of a row: cut at "|", but not at "\|", nor in code.
function cells(line) {
  const found = [];
  let cell = "";
  const parts =
    line
      .trim()
      .replace(/^\|/, "")
      .match(/`[^`]*`|\\.|[^`\\|]+|[`\\|]/g) ?? [];
  if (parts.at(-1) === "|") parts.pop();
  for (const part of parts) {
    if (part === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += part === "\\|" ? "|" : part;
  }
  return [...found, cell.trim()];
}

function paragraph(lines, at) {
  let to = at + 1;
  while (to < lines.length && lines[to].trim() && !begins(lines, to)) {
    const under = /^ {0,3}(=+|-+)\s*$/.exec(lines[to]);
    if (under) {
      const inline = parseInline(
        lines
          .slice(at, to)
          .map((line) => line.trimStart())
          .join("\n"),
      );
      return { type: "heading", level: under[1][0] === "=" ? 1 : 2, inline, to: to + 1 };
    }
    to++;
  }
  const text = lines
    .slice(at, to)
    .map((line) => line.trimStart())
    .join("\n");
  return { type: "paragraph", inline: parseInline(text.trimEnd()), to };
}

// Whether a line ends the paragraph before it; or the table, in which another cannot begin.
function begins(lines, at, inTable = false) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const starts = item && line.slice(item[0].length).trim() && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  const under = /^ {0,3}-+\s*$/.test(line); // a heading's line, or a rule
  return (
    FENCE.test(line) ||
    HEADING.test(line) ||
    QUOTE.test(line) ||
    Boolean(starts) ||
    (RULE.test(line) && !under) ||
    (!inTable && tableTop(lines, at) !== null)
  );
}
