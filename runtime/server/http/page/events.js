// Server-sent events, as the HTML standard has them: text in any cuts -> the data of each event.

export class EventParser {
  #held = ""; // what may be a part of a line
  #data = []; // the lines of the event that is not over

  // The data of the events that end in this piece of text.
  push(text) {
    const found = [];
    let rest = this.#held + text;
    if (rest.startsWith("\ufeff")) rest = rest.slice(1);
    for (;;) {
      const end = rest.search(/[\r\n]/);
      if (end < 0 || (rest[end] === "\r" && end + 1 === rest.length)) break; // "\n" may follow "\r"
      this.#line(rest.slice(0, end), found);
      rest = rest.slice(end + (rest.startsWith("\r\n", end) ? 2 : 1));
    }
    this.#held = rest;
    return found;
  }

  #line(line, found) {
    if (line === "") {
      if (this.#data.length) found.push(this.#data.join("\n"));
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value); // comments, ids and names of events say nothing here
  }
}

// The JSON values of a streamed answer, up to [DONE]. An answer that breaks off ends with an Error.
export async function* jsonEvents(stream) {
  const parser = new EventParser();
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the answer broke off: the connection was closed");
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
