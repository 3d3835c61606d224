// The list of conversations.
import { asMarkdown } from "./conversation.js";
import { at, h, iconButton } from "./dom.js";

const DAY_MS = 86_400_000;

export class ChatList {
  constructor(store, closed) {
    this.store = store;
    this.closed = closed; // called when a conversation was chosen, for the phone's drawer
    at("new-chat").addEventListener("click", () => {
      this.chat.new();
      closed();
    });
    at("search").addEventListener("input", () => this.draw());
    window.addEventListener("storage", () => this.draw()); // another tab
  }

  draw() {
    const wanted = at("search").value.trim().toLowerCase();
    const found = this.store.list().filter(({ title }) => title.toLowerCase().includes(wanted));
    let before = "";
    const rows = found.flatMap((entry) => {
      const age = ageOf(entry.changed);
      const head = age === before ? [] : [h("li", { class: "age" }, age)];
      before = age;
      return [...head, this.row(entry)];
    });
    at("chat-list").replaceChildren(...rows);
    at("no-chats").hidden = rows.length > 0;
  }

  row({ id, title }) {
    const current = id === this.chat?.conversation.id;
    const open = h(
      "button",
      {
        type: "button",
        class: "open",
        "aria-current": current ? "true" : null,
        title,
        onclick: () => {
          this.chat.open(this.store.load(id));
          this.closed();
        },
      },
      title || "Untitled",
      this.chat?.running.has(id) && h("i", { class: "busy", title: "an answer is coming" }),
    );
    const save = iconButton("save", "Download as Markdown", () => download(this.store.load(id)));
    const remove = iconButton("bin", "Delete this chat", () => {
      if (!confirm(`Delete “${title || "Untitled"}”?`)) return;
      const running = this.chat.running.get(id);
      if (running) {
        running.conversation.removed = true;
        running.controller.abort();
      }
      this.store.remove(id);
      if (id === this.chat.conversation.id) this.chat.new();
      this.draw();
    });
    return h("li", { class: current ? "current" : null }, open, save, remove);
  }
}

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  return time >= midnight
    ? "Today"
    : time >= midnight - DAY_MS
      ? "Yesterday"
      : time >= midnight - 7 * DAY_MS
        ? "Last week"
        : "Older";
}

function download(conversation) {
  const url = URL.createObjectURL(new Blob([asMarkdown(conversation)], { type: "text/markdown" }));
  const link = h("a", {
    href: url,
    download: `${(conversation.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.md`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
