// Elements, numbers and text. Whatever a model wrote becomes a text node or an attribute, never markup.

const SVG_SPACE = 'http://www.w3.org/2000/svg';

function build(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === 'data') Object.assign(element.dataset, value);
    else if (name === 'value') element.value = value;
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(4)) {
    if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, props, ...children) => build(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => build(document.createElementNS(SVG_SPACE, tag), props, children);

// Characters that would hide, reorder or break what stands around them, and marks that pile up over the lines above. What joins and
// chooses emoji stays.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffb]|\p{Cs}|(?![\u200d\ufe00-\ufe0f])\p{Default_Ignorable_Code_Point}|(?<=\p{M}{4})\p{M}/gu;
const named = (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`;

/** The beginning of a text, which ends between two characters. */
const start = (text, limit) => text.slice(0, limit).replace(/[\ud800-\udbff]$/, '');

/** Running text: line breaks stay, everything unseen gets a name, very long pieces are cut and say so. */
export function running(text, limit = 4000) {
  const cut = text.length > limit ? `${start(text, limit)} … (${text.length} characters)` : text;
  return cut.replace(UNSEEN, named).replace(/\n/g, '↵\n').replace(/\t/g, '⇥\t');
}

/** The text behind what `running` shows: a line break of the text has its mark, any other is the layout's. */
const bare = (shown) => shown.replace(/↵?\n/g, (found) => (found.length > 1 ? '\n' : '')).replace(/⇥\t/g, '\t');

/** What is copied out of one text is the text itself. */
export function copied(event) {
  const marked = document.getSelection(), around = marked.rangeCount ? marked.getRangeAt(0).commonAncestorContainer : null;
  if (!(around?.nodeType === Node.TEXT_NODE ? around.parentNode : around)?.closest?.('.text')) return;
  event.clipboardData.setData('text/plain', bare(marked.toString()));
  event.preventDefault();
}

/** A label of one line: spaces at the ends and line breaks are visible too. */
export function label(text, limit = 40) {
  const cut = text.length > limit ? `${start(text, limit)}…` : text;
  const plain = cut.replace(UNSEEN, named).replace(/\n/g, '↵').replace(/\t/g, '⇥').replace(/^ +| +$/g, (run) => '␣'.repeat(run.length));
  return plain === '' ? '∅' : plain;
}

const known = (value) => typeof value === 'number' && Number.isFinite(value);
export const number = (value, digits = 2) => (known(value) ? value.toFixed(digits) : '–');
export const integer = (value) => (known(value) ? Math.round(value).toLocaleString('en-US') : '–');
export const counted = (many, what, several = `${what}s`) => `${integer(many)} ${many === 1 ? what : several}`;
export const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : '–');
export const chance = (value) => (known(value) ? (value !== 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3)) : '–');

export function seconds(value) {
  if (!known(value)) return '–';
  if (Math.abs(value) >= 1) return `${value.toFixed(2)} s`;
  return Math.abs(value) >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
}

export function table(caption, heads, rows, props) {
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
    h('table', props, h('caption', null, caption),
      h('thead', null, h('tr', null, heads.map((head) => h('th', { scope: 'col' }, head)))),
      h('tbody', null, rows.map((row) => h('tr', null, row.map((cell, i) => h(i ? 'td' : 'th', i ? null : { scope: 'row' }, cell)))))));
}

export function slider(name, { min, max, step, value, show = (v) => number(v) }, changed) {
  const shown = h('output', null, show(value));
  const input = h('input', { type: 'range', min, max, step, 'aria-label': name });
  input.value = value;
  input.addEventListener('input', () => { shown.textContent = show(Number(input.value)); changed(Number(input.value)); });
  return h('label', { class: 'slider' }, h('span', null, name), input, shown);
}

export function choice(name, options, value, changed) {
  const select = h('select', { 'aria-label': name, on: { change: () => changed(select.value) } },
    options.map(([key, text]) => h('option', { value: key }, text)));
  select.value = value;
  return select;
}

export const button = (text, pressed, props) => h('button', { type: 'button', on: { click: pressed }, ...props }, text);
export const panel = (title, ...children) => h('section', { class: 'panel' }, h('h2', null, title), ...children);
