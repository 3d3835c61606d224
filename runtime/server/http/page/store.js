// What the page remembers, in the browser only: conversations, settings, and the key where that is wanted.

const CHAT = "icc.chat.";

export class Store {
  // storage: localStorage, or what behaves like it
  constructor(storage) {
    this.storage = storage;
  }

  read(name, otherwise) {
    try {
      return JSON.parse(this.storage.getItem(`icc.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  // Whether it was written: a browser may be full, or may forbid it.
  write(name, value) {
    try {
      this.storage.setItem(`icc.${name}`, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  // {id, title, changed} of every conversation, the latest first.
  list() {
    const found = [];
    for (let n = 0; n < this.storage.length; n++) {
      const name = this.storage.key(n);
      const chat = name.startsWith(CHAT) ? this.read(name.slice(4), null) : null;
      if (chat?.turns) found.push({ id: chat.id, title: chat.title, changed: chat.changed });
    }
    return found.sort((a, b) => b.changed - a.changed);
  }

  load(id) {
    const chat = this.read(`chat.${id}`, null);
    return chat?.turns ? chat : null;
  }

  // Saves a conversation, without the probabilities of its tokens: they are large. Where there is no room, the
  // conversation that is longest unused makes some. Whether it was saved.
  save(chat) {
    const turns = Object.values(chat.turns).map(({ tokens, live, ...turn }) => [turn.id, turn]);
    const kept = { ...chat, turns: Object.fromEntries(turns) };
    for (;;) {
      if (this.write(`chat.${chat.id}`, kept)) return true;
      const oldest = this.list().findLast(({ id }) => id !== chat.id);
      if (!oldest) return false;
      this.remove(oldest.id);
    }
  }

  remove(id) {
    this.storage.removeItem(CHAT + id);
  }
}
