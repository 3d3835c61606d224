// Calls of tools on the page: what the model asks for, and where their results are written.
import { growing, h } from "./dom.js";
import { pretty } from "./tools.js";

// The calls of an answer, with their arguments, as far as they have come; `live`: more may come.
export function callCards(calls, live) {
  return calls.map(({ name, arguments: text }) => {
    const found = pretty(text);
    return card(`calls ${name}${found === null && !live ? ", cut off" : ""}`, found ?? text);
  });
}

// A form with a field for the result of each call; `send(results)` gets [{id, name, content}]. `cancel` where there is a
// way back, to the results of before.
export function resultsForm(calls, before, send, cancel) {
  const areas = calls.map(({ name }, n) => {
    const area = h("textarea", { rows: "1", class: "edit", "aria-label": `Result of ${name}` });
    area.placeholder = `What ${name} gives back: text or JSON`;
    area.value = before?.[n]?.content ?? "";
    return area;
  });
  const form = h(
    "form",
    { class: "results" },
    calls.map(({ name }, n) => h("label", {}, h("span", {}, `Result of ${name}`), areas[n])),
    h(
      "div",
      { class: "row" },
      h("button", { class: "primary" }, calls.length > 1 ? "Send the results" : "Send the result"),
      cancel && h("button", { type: "button", onclick: cancel }, "Cancel"),
    ),
  );
  areas.forEach(growing);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map(({ id, name }, n) => ({ id, name, content: areas[n].value })));
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && cancel) {
      event.stopPropagation();
      cancel();
    }
    if (event.key !== "Enter" || event.target.localName !== "textarea" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  return form;
}

// Results that were given.
export function resultCards(results) {
  return results.map(({ name, content }) => card(`result of ${name}`, content));
}

function card(title, text) {
  const bar = h("div", { class: "code-bar" }, h("span", {}, title));
  return h("div", { class: "call code" }, bar, h("pre", { tabindex: "0" }, h("code", {}, text)));
}
