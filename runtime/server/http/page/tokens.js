// An answer token by token: each in the colour of its probability, with what else was likely on hover, tap or arrow keys.
import { at, h } from "./dom.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·"));

// Texts of tokens as they are read: a character of several tokens stands with the last of them.
export function readable(tokens) {
  if (!tokens.every(({ bytes }) => bytes)) return tokens.map(({ text }) => text);
  const decoder = new TextDecoder();
  return tokens.map(({ bytes }) => decoder.decode(new Uint8Array(bytes), { stream: true }));
}

export function renderTokens(element, tokens) {
  const texts = readable(tokens);
  let shown = element.childElementCount;
  if (shown > tokens.length) element.replaceChildren();
  for (shown = element.childElementCount; shown < tokens.length; shown++) {
    const token = tokens[shown];
    const span = h("span", { class: "token", role: "listitem", tabindex: shown ? "-1" : "0" }, texts[shown]);
    span.style.setProperty("--doubt", token.logprob === null ? 0 : (1 - Math.exp(token.logprob)).toFixed(3));
    span.token = token;
    element.append(span);
  }
}

export function tokenList() {
  const list = h("div", { class: "tokens", role: "list", "aria-label": "Tokens with their probabilities" });
  const show = (event) => event.target.token && showTip(event.target);
  list.addEventListener("pointerover", show);
  list.addEventListener("focusin", show);
  list.addEventListener("pointerleave", hideTip);
  list.addEventListener("focusout", hideTip);
  list.addEventListener("click", (event) => event.target.token && event.target.focus());
  list.addEventListener("keydown", (event) => {
    const side = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key];
    const next = side
      ? event.target[side]
      : event.key === "Home"
        ? list.firstChild
        : event.key === "End"
          ? list.lastChild
          : null;
    if (event.key === "Escape") hideTip();
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return list;
}

function showTip(span) {
  const { token } = span;
  const tip = at("tip");
  const others = token.top.filter(({ text }) => text !== token.text);
  const rows = [{ ...token, chosen: true }, ...others]
    .filter(({ logprob }) => logprob !== null)
    .sort((a, b) => b.logprob - a.logprob)
    .map(({ text, logprob, chosen }) => {
      const bar = h("i");
      bar.style.setProperty("--share", Math.exp(logprob).toFixed(4));
      return h(
        "tr",
        { class: chosen && "chosen" },
        h("td", {}, h("code", {}, visible(text))),
        h("td", {}, bar),
        h("td", {}, percent(logprob)),
      );
    });
  const note =
    token.logprob === null ? "the first token: nothing predicts it" : `log-probability ${token.logprob.toFixed(3)}`;
  tip.replaceChildren(h("table", {}, rows), h("p", {}, note));
  tip.hidden = false;
  const place = span.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left), document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
}

function hideTip() {
  at("tip").hidden = true;
}
