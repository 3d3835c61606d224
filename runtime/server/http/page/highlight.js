// Colours for code: text -> [{kind, text}], kind one of "comment", "string", "number", "keyword", "name" or "".
// One pass with one expression per family of languages; what it does not know it leaves plain.

const MOST_CHARS = 40_000;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)\w*`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`;
const C_COMMENT = String.raw`\/\/[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/)?`;
const HASH = String.raw`#[^\n]*`;

const words = (text) => new Set(text.split(" "));
const PYTHON = words(
  "and as assert async await break class continue def del elif else except finally for from global if import in is lambda match case nonlocal not or pass raise return try while with yield None True False self",
);
const SCRIPT = words(
  "async await break case catch class const continue default delete do else export extends finally for from function if implements import in instanceof interface let new null of private public return static super switch this throw true false try type typeof undefined var void while yield enum readonly",
);
const C = words(
  "alignas auto bool break case catch char class const constexpr continue default defer delete do double else enum explicit extern false final float fn for func go goto if impl import inline int interface let long loop match mod mut namespace new nil null nullptr override package private protected pub public range return self short signed sizeof static struct super switch template this throw trait true try type typedef typename union unsigned use using var virtual void volatile where while abstract extends implements instanceof boolean byte final throws chan map select fallthrough ref crate dyn async await move i32 i64 u8 u32 u64 usize f32 f64 string val fun object when internal",
);
const SHELL = words(
  "if then else elif fi for while until do done case esac in function return export local set unset cd echo exit sudo source alias",
);
const SQL = words(
  "select from where and or not null is in as on join left right inner outer full group by order having limit offset insert into values update set delete create table index view drop alter add primary key foreign references unique default case when then else end distinct union all exists between like count sum avg min max with",
);
const DATA = words("true false null yes no on off");

const family = (known, comment, strings, fold = false) => ({
  known,
  fold,
  pattern: new RegExp(`(${comment || "(?!)"})|(${strings})|(${NUMBER})|([A-Za-z_$][\\w$]*)(?=(\\s*\\()?)`, "g"),
});
const FAMILIES = {
  python: family(
    PYTHON,
    HASH,
    String.raw`[rbfuRBFU]{0,2}"""(?:[^\\]|\\.)*?(?:"""|$)|[rbfuRBFU]{0,2}'''(?:[^\\]|\\.)*?(?:'''|$)|[rbfu]{0,2}${DOUBLE}|[rbfu]{0,2}${SINGLE}`,
  ),
  script: family(SCRIPT, C_COMMENT, String.raw`${DOUBLE}|${SINGLE}|\x60(?:[^\x60\\]|\\.)*\x60?`),
  c: family(C, C_COMMENT, `${DOUBLE}|'(?:[^'\\\\\\n]|\\\\.)'`),
  shell: family(SHELL, String.raw`(?<=^|\s)#[^\n]*`, `${DOUBLE}|'[^']*'?`),
  sql: family(SQL, String.raw`--[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/)?`, `${SINGLE}|${DOUBLE}`, true),
  data: family(DATA, HASH, `${DOUBLE}|${SINGLE}`),
  json: family(DATA, "", DOUBLE),
};
const LANGUAGES = {
  python: "python py python3 gyp mojo",
  script: "javascript js jsx ts tsx typescript mjs",
  sql: "sql sqlite postgresql mysql",
  c: "c cpp c++ cc h hpp cuda java go golang rust rs swift kotlin kt scala cs csharp c# php zig dart proto",
  shell: "bash sh shell zsh console fish dockerfile make makefile",
  data: "yaml yml toml ini conf",
  json: "json jsonc json5",
};
const FAMILY_OF = Object.fromEntries(
  Object.entries(LANGUAGES).flatMap(([name, list]) => list.split(" ").map((language) => [language, FAMILIES[name]])),
);

export function highlight(text, language) {
  const found = FAMILY_OF[language];
  if (!found || text.length > MOST_CHARS) return [{ kind: "", text }];
  const parts = [];
  let done = 0;
  const put = (kind, from, to) => to > from && parts.push({ kind, text: text.slice(from, to) });
  for (const match of text.matchAll(found.pattern)) {
    const [whole, comment, string, number, word, call] = match;
    const known = word && found.known.has(found.fold ? word.toLowerCase() : word);
    const kind = comment ? "comment" : string ? "string" : number ? "number" : known ? "keyword" : call ? "name" : "";
    if (!kind) continue;
    put("", done, match.index);
    put(kind, match.index, match.index + whole.length);
    done = match.index + whole.length;
  }
  put("", done, text.length);
  return parts;
}
