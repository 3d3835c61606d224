// Elements, and nothing that reads HTML: text goes in as text.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

// h("button", { class: "quiet", onclick: stop }, "Stop"): attributes, listeners where they are functions, children.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A symbol of index.html.
export function icon(name) {
  return s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#i-${name}` }));
}

// A button that is only an icon, with its name for those who do not see it.
export function iconButton(name, label, onclick, attributes = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...attributes },
    icon(name),
  );
}

// Puts text into the clipboard, also where the page has no secure origin; whether that worked.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "off-screen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// A button that copies what `read` returns and says so for a moment.
export function copyButton(read, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(read());
    button.replaceChildren(icon(done ? "check" : "close"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

// Lets a text area grow with its text, up to what its style allows.
export function growing(area) {
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  };
  area.addEventListener("input", fit);
  return fit;
}

// A function that runs once in the next frame however often it is called before.
export function oncePerFrame(work) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
}
