// Model text is shown, never interpreted: every string ends in textContent, and characters that
// would act on the line (controls, direction marks, zero-width ones) are shown by their code.

const ACTING = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202f" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}\\p{Surrogate}]", "u");

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function codePoint(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

// Puts `text` into `node`; line ends and tabs get a mark, and so do spaces where asked, or where a
// token is nothing else.
function appendVisible(node, text, spaces = false) {
  const blank = /^[ \u00a0]+$/.test(text);
  let run = "";
  const flush = () => { if (run) node.append(document.createTextNode(run)); run = ""; };
  const mark = (shown, kind = "mark") => { flush(); node.append(element("span", { class: kind }, shown)); };
  for (const character of text) {
    if (character === "\n") { mark("↵"); run += "\n"; }
    else if (character === "\t") mark("⇥\t");
    else if (blank || (spaces && character === " ")) mark("·");
    else if (ACTING.test(character)) mark(codePoint(character), "mark code");
    else run += character;
  }
  flush();
  if (text === "") mark("∅");
  return node;
}

function digits(value, count = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(count - 1).replace("-", "−");
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 8)).replace("-", "−");
}

function signed(value, count = 3) {
  return value > 0 ? "+" + digits(value, count) : digits(value, count);
}

function percent(share) {
  if (share === null || !Number.isFinite(share)) return "–";
  return (100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0) + " %";
}

function readJSON(id) {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
}
