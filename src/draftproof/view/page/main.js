// The page: where the trace comes from, which view is shown, and the address that leads back to it.

import { acceptanceView } from './acceptance.js';
import { compareView } from './compare.js';
import { button, choice, copied, h, label, panel } from './dom.js';
import { ganttView } from './gantt.js';
import { learnPage } from './learn.js';
import { paysView } from './pays.js';
import { raceView } from './race.js';
import { Replay } from './replay.js';
import { roundsView } from './rounds.js';
import { Session } from './server.js';
import { statusView } from './status.js';
import { textView } from './text.js';
import { Trace, TraceError, around, requestName } from './trace.js';
import { treeView } from './tree.js';
import { verificationView } from './verification.js';

const learnView = {
  id: 'learn', title: 'Learn', still: true,
  draw(ctx) {
    const place = h('div', null, 'Loading …');
    lesson().then((trace) => place.replaceChildren(...learnPage(trace).flat()), (error) => place.replaceChildren(h('p', { role: 'alert' }, error.message)));
    return [place];
  },
};
// `still`: what it shows is not drawn again because a live trace has grown
const VIEWS = [statusView, textView, roundsView, treeView, verificationView, ganttView, acceptanceView, paysView, raceView, compareView, learnView];
const state = { view: statusView, trace: null, request: null, token: 0, source: 'none', lesson: null };
const main = document.querySelector('main'), nav = document.querySelector('nav'), notice = document.querySelector('#notice'), head = document.querySelector('#controls'), talk = document.querySelector('#talk');
const replay = new Replay((cursor) => { follow(cursor); address(); });
let session = null, drawn = 0, shown = null;

/** Bytes that stand in the page itself, packed; null where there are none. */
function embedded(id) {
  const block = document.querySelector(`#${id}`);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (char) => char.charCodeAt(0));
  return new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
}

const unpacked = (name, stream) => (/\.gz$/.test(name) ? stream.pipeThrough(new DecompressionStream('gzip')) : stream);

async function fetched(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new TraceError(`The trace ${name} could not be loaded: the server answered ${answer.status}.`);
  return unpacked(name, answer.body);
}

async function lesson() {
  state.lesson ??= await new Trace('demo').read(embedded('learn-data') ?? await fetched('learn.jsonl'));
  return state.lesson;
}

const link = (view, changes = {}) => {
  const chosen = view === 'compare' && state.other ? { b: state.other } : view === 'acceptance' && state.scope ? { of: state.scope } : {};
  const now = { r: state.request?.index ?? 0, round: Math.max(0, replay.cursor - 1), token: 0, ...chosen, ...changes };
  return `#/${view}?${new URLSearchParams(now)}`;
};

function context() {
  return { trace: state.trace, request: state.request, cursor: replay.cursor, token: state.token, state, link, redraw: draw, load: open, complain,
    go: (view, changes) => { location.hash = link(view, changes); } };
}

function complain(text) {
  notice.hidden = !text;
  notice.replaceChildren(...(text ? [text, button('Dismiss', () => complain(''))] : []));
}

function tell(error) {
  if (!(error instanceof TraceError)) console.warn(error);
  complain(error instanceof TraceError ? error.message : `This could not be shown: ${error.message}`);
}

/** The tabs lead to the round in sight. */
function aim() { for (const item of nav.children) item.href = link(item.dataset.view); }

function draw() {
  state.view.leave?.();
  for (const view of VIEWS) view.follow = view.leave = view.repaint = undefined;
  aim();
  for (const item of nav.children) {
    if (item.dataset.view !== state.view.id) { item.removeAttribute('aria-current'); continue; }
    item.setAttribute('aria-current', 'page');
    nav.scrollLeft = item.offsetLeft - nav.offsetLeft - 40;
  }
  talk.hidden = !session || (state.view !== statusView && state.view !== raceView);
  document.title = `${state.view.title} – Draftproof`;
  drawn = performance.now();
  if (!state.request && state.view !== learnView) return welcome();
  try {
    main.replaceChildren(...state.view.draw(context()).flat(3).filter(Boolean));
    shown = state.view;
  } catch (error) {
    main.replaceChildren(panel('This view cannot show this trace', h('p', null, label(error.message, 300))));
    tell(error);
  }
  return undefined;
}

function welcome() {
  shown = null;
  const file = h('input', { type: 'file', accept: '.jsonl,.json,.gz', id: 'first-file', 'aria-label': 'trace file', on: { change: () => file.files.length && show(file.files[0]) } });
  main.replaceChildren(panel('No trace yet', h('p', null, session ? 'Send a message; its rounds appear here as they run.' : 'Open a trace, drop one onto this page, or begin with the explainer.'),
    h('p', null, file), h('p', null, h('a', { href: '#/learn' }, 'How guessing ahead works'))));
}

function follow(cursor) {
  state.token = 0;
  aim();
  state.view.follow?.({ ...context(), cursor });
}

let addressed = 0;
function address() {
  clearTimeout(addressed);               // browsers limit how often an address may change
  addressed = setTimeout(() => history.replaceState(null, '', link(state.view.id, { token: state.token })), 250);
}

function route() {
  const [, name, query] = /^#\/([a-z]*)\??(.*)$/.exec(location.hash) ?? [], asked = new URLSearchParams(query);
  if (asked.has('r')) session?.release();
  const view = VIEWS.find((one) => one.id === name) ?? statusView, number = (key) => { const n = Number(asked.get(key)); return Number.isInteger(n) && n >= 0 ? n : 0; };
  const request = state.trace?.requests[asked.has('r') ? number('r') : state.request?.index ?? 0] ?? state.trace?.requests[0] ?? null;
  const same = view === state.view && request === state.request && view.follow;
  if (view !== state.view) { state.view.leave?.(); state.view.leave = undefined; }
  state.view = view;
  if (request !== state.request) replay.play(false);
  state.request = request;
  state.token = number('token');
  if (view === compareView) state.other = number('b');
  if (view === acceptanceView) state.scope = asked.get('of');
  const requests = state.trace?.requests ?? [];
  if (notice.hidden && name && name !== view.id) complain(`The address names the view ${name}; there are ${VIEWS.map((one) => one.id).join(', ')}. Shown is ${view.title}.`);
  const beyond = (verb, place, { length }, whose) => { if (state.trace?.complete && notice.hidden && requests.length && place >= length) complain(`The address ${verb} request ${place}; ${whose} trace has ${length}, counted from 0. Shown is the first.`); };
  beyond('names', number('r'), requests, 'this');
  if (view === compareView) beyond('compares with', state.other, state.second?.requests ?? requests, 'its');
  if (request) {
    const fallback = view === textView || view === raceView ? request.rounds.length : Math.min(1, request.rounds.length);
    replay.set(state.trace, request, asked.has('round') && (asked.get('round') !== '0' || view !== textView) ? number('round') + 1 : fallback);
  }
  controls();
  if (!same) return draw();
  aim();
  return state.view.follow(context());
}

function controls() {
  document.querySelector('footer').hidden = !state.request || state.view === learnView;
  const requests = state.trace?.requests ?? [];
  const pick = requests.length ? choice('request', around(requests, state.request?.index ?? 0, 1000).map((one) => [one.index, label(requestName(one), 80)]), state.request?.index ?? 0, (value) => { location.hash = link(state.view.id, { r: value, round: 0 }); }) : null;
  document.querySelector('#printed').textContent = state.request ? `${label(state.trace.name, 60)} · ${label(requestName(state.request), 120)}` : '';
  head.replaceChildren(h('span', { class: 'file' }, state.trace ? label(state.trace.name, 60) : ''), ...(pick ? [h('label', null, 'Request ', pick)] : []),
    button('Open …', () => opener.click(), { id: 'open' }), button('Light / dark', theme, { id: 'theme' }));
}

const opener = h('input', { type: 'file', accept: '.jsonl,.json,.gz', hidden: true, id: 'file', 'aria-label': 'trace file', on: { change: () => opener.files.length && show(opener.files[0]) } });

function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  if (state.view.follow) state.view.follow(context());
}

let lit = '';
/** Paper is light, whatever the screen shows. */
function paper(printing) {
  const root = document.documentElement.dataset;
  if (printing) { lit = root.theme ?? ''; root.theme = 'light'; } else if (lit) root.theme = lit; else delete root.theme;
  state.view.repaint?.();
}

/** A file as a trace, not yet shown. */
async function open(file, trace = new Trace(file.name), progress = undefined) {
  return trace.read(unpacked(file.name, file.stream()), progress);
}

async function show(file) { await load(file.name, (trace, progress) => open(file, trace, progress)); }

/** Read a trace and show it as soon as its first request is there. */
async function load(name, read) {
  complain('');
  session?.stop();
  session = null;                        // a file takes the server's place until the page is loaded again
  const trace = new Trace(name), before = { trace: state.trace, request: state.request };
  const progress = () => {
    main.setAttribute('aria-busy', 'true');
    if (!trace.requests[0]?.rounds.length || performance.now() - drawn < 1000) return;
    if (state.trace !== trace) { state.trace = trace; state.request = null; route(); } else if (!state.view.follow) draw();
    complain(`Reading: ${Math.round(trace.bytes / 1e6)} MB, ${trace.roundCount.toLocaleString('en-US')} rounds so far.`);
  };
  try {
    await read(trace, progress);
    Object.assign(state, { trace, request: null, second: null });
    complain(trace.damage ?? (trace.requests.length ? '' : 'This trace holds no request: its writer served none, or none yet.'));
    route();
  } catch (error) {
    Object.assign(state, before);
    route();
    tell(error);
  } finally {
    main.removeAttribute('aria-busy');
    performance.mark('draftproof-loaded');
  }
}

/** A running server behind this page, if there is one. */
async function connect(key = '') {
  const found = new Session({ shown: grown, told: complain, raced: (pair) => { state.starts = !matchMedia('(prefers-reduced-motion: reduce)').matches; location.hash = link('race', { r: pair.on.index, round: 0 }); } });
  const answer = await found.open(key);
  if (answer === 'key') return askKey(key ? 'The server does not know this key.' : '');
  if (answer !== 'open') return draw();
  session = found;
  state.source = 'live';
  talk.replaceChildren(...found.panels);
  window.addEventListener('pagehide', () => found.stop());
  return draw();
}

/** The key is kept in this page's memory and nowhere else. */
function askKey(told) {
  const field = h('input', { type: 'password', autocomplete: 'off', id: 'key', 'aria-label': 'API key' });
  main.replaceChildren(panel('This server asks for its API key', told ? h('p', { role: 'alert' }, told) : null,
    h('form', { class: 'bar', on: { submit: (event) => { event.preventDefault(); connect(field.value.trim()); } } }, field, h('button', { type: 'submit', id: 'key-send' }, 'Connect'))));
}

let ends = 0, due = 0;
/** The live trace has grown: show the newest request, the one that the chat sent, or the one that the reader chose. */
function grown(trace, own) {
  const chosen = state.trace === trace && location.hash.includes('r=') ? state.request : null, before = state.request;
  state.trace = trace;
  state.request = own ?? chosen ?? trace.requests.at(-1) ?? null;
  if (!state.request) return;
  if (state.request === before && (replay.playing || replay.cursor < ends)) replay.grow();
  else replay.set(trace, state.request, state.request.rounds.length);
  ends = state.request.rounds.length;
  if (state.view === roundsView && state.view.follow && state.request === before) state.view.follow(context());
  due ||= setTimeout(refresh, Math.max(0, 250 - (performance.now() - drawn)));
}

/** Show what came, unless the reader is in the middle of something: then when they have left it. */
function refresh() {
  const inside = (place) => place !== document.activeElement && place.contains(document.activeElement), marked = document.getSelection();
  const busy = inside(main) || (!marked.isCollapsed && main.contains(marked.anchorNode));
  due = busy ? setTimeout(refresh, 1000) : 0;
  if (!inside(head)) controls();
  if (!busy && !(state.view.still && shown === state.view)) draw();
}

function keys(event) {
  if (event.target.closest('input, select, textarea') || event.ctrlKey || event.metaKey || event.altKey) return;
  const wide = event.target.closest('.scroll');
  if (wide && wide.scrollWidth > wide.clientWidth && event.key.startsWith('Arrow')) return;      // they scroll it
  if (event.key === ' ' && !event.target.closest('button, a')) { event.preventDefault(); if (state.request) replay.play(!replay.playing); }
  if (event.key === 'ArrowRight' && state.request) replay.step(1);
  if (event.key === 'ArrowLeft' && state.request) replay.step(-1);
}

function begin() {
  nav.append(...VIEWS.map((view) => h('a', { href: `#/${view.id}`, data: { view: view.id } }, view.title)));
  document.querySelector('footer').append(replay.bar);
  document.body.append(opener);
  document.querySelector('#skip').addEventListener('click', (event) => { event.preventDefault(); main.focus(); });      // its address would be a view's
  window.addEventListener('hashchange', route);
  document.addEventListener('keydown', keys);
  document.addEventListener('copy', copied);
  window.addEventListener('beforeprint', () => paper(true));
  window.addEventListener('afterprint', () => paper(false));
  document.addEventListener('dragover', (event) => { event.preventDefault(); document.body.classList.add('drop'); });
  document.addEventListener('dragleave', (event) => { if (!event.relatedTarget) document.body.classList.remove('drop'); });
  document.addEventListener('drop', (event) => { event.preventDefault(); document.body.classList.remove('drop'); if (event.dataTransfer.files.length) show(event.dataTransfer.files[0]); });
  const block = document.querySelector('#trace-data'), asked = new URLSearchParams(location.search).get('trace');
  route();
  if (block) load(block.dataset.name, (trace, progress) => trace.read(embedded('trace-data'), progress)).then(() => { if (block.dataset.note) complain(block.dataset.note); });
  else if (asked && /^[\w.-]+$/.test(asked)) load(asked, async (trace, progress) => trace.read(await fetched(asked), progress));
  else if (location.protocol.startsWith('http')) connect();
}

begin();
