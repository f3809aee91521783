// The text, every token with its role; hover, focus or the arrow keys tell the rest.

import { button, chance, h, label, number, panel, running } from './dom.js';
import { ROLE_NAMES, reasons, roundWords, walk } from './words.js';

const BLOCK = 400;                       // rounds per block of the document; far blocks are empty until they come near

function guesses(trace, request, ordinal) {
  const record = trace.record(request.rounds[ordinal]);
  const lost = record.nodes.filter((node) => node.fate !== 'accepted').slice(0, 64);
  return lost.map((node) => h('span', { class: `guess ${node.fate}`, data: { of: ordinal }, title: `${node.fate}, round ${record.round}` }, running(trace.piece(node.token, request), 200)));
}

/** The pieces of one round, each with its role; `unfold`: with the guesses that failed. */
export function roundSpans(trace, request, ordinal, unfold) {
  const record = trace.record(request.rounds[ordinal]), words = roundWords(trace, request, record), mark = { 'data-round': ordinal };
  const spans = [];
  if (words) {
    record.tokens.forEach((token, j) => spans.push(h('span', { ...mark, 'data-token': j, class: `tok ${token.role}`, tabindex: '-1' }, running(words[j], 2000) || '·')));
  } else {
    const role = record.tokens.at(-1)?.role ?? 'accepted';
    spans.push(h('span', { ...mark, 'data-token': 0, class: `tok whole ${role}`, tabindex: '-1' }, running(record.text, 2000) || '·',
      record.tokens.length > 1 ? h('sup', null, record.tokens.length) : null));
  }
  if (!unfold) return spans;
  const lost = guesses(trace, request, ordinal), last = record.tokens.at(-1);
  return last && (last.role === 'correction' || last.role === 'bonus') && words ? [...spans.slice(0, -1), ...lost, spans.at(-1)] : [...spans, ...lost];
}

export function prefillSpan(trace, request) {
  if (!request.prefill) return null;
  const text = request.header.vocabulary ? trace.piece(request.prefill.token.token, request) : request.prefill.text;
  return h('span', { class: 'tok prefill', 'data-round': -1, 'data-token': 0, tabindex: '-1' }, running(text, 2000) || '·');
}

export function tokenFacts(trace, request, ordinal, j) {
  if (ordinal < 0) {
    const token = request.prefill.token;
    return [['token', `${label(trace.piece(token.token, request))} (id ${token.token})`], ['role', ROLE_NAMES.prefill], ['p', chance(token.p)]];
  }
  const record = trace.record(request.rounds[ordinal]), step = walk(record)[j], token = step?.token;
  if (!token) return [];
  const node = step.node === null ? null : record.nodes[step.node], rival = record.nodes[step.siblings[0]];
  const list = (all) => all.map((a) => `${label(trace.piece(a.token, request), 20)} ${chance(a.probability)}`).join(' · ');
  const facts = [
    ['token', request.header.vocabulary ? `${label(trace.piece(token.token, request))} (id ${token.token})` : `id ${token.token}`], ['role', ROLE_NAMES[token.role]],
    ['round', `${record.round}, depth ${record.depth}, drafter ${label(record.drafter)}`], ...(reasons(record) ? [['why so deep', reasons(record)]] : []), ['position', record.position + j],
  ];
  if (!request.header.vocabulary) facts[0] = ['tokens', `${record.tokens.length}: ${record.tokens.map((one) => one.role).join(', ')}`];
  if (token.p !== undefined) facts.push(['p (target)', chance(token.p)]);
  if (node?.q !== undefined) facts.push(['q (draft)', chance(node.q)]);
  if (token.noise !== undefined) facts.push(['shared noise', number(token.noise, 3)]);
  if ((node ?? rival)?.coin !== undefined) facts.push(['coin u', chance((node ?? rival).coin)]);
  if (!node && rival) facts.push(['guessed instead', `${label(trace.piece(rival.token, request))} (p ${chance(rival.p)}, q ${chance(rival.q)})`]);
  if (token.alternatives?.length) facts.push(['target’s likeliest', list(token.alternatives)]);
  if (token.draft_alternatives?.length) facts.push(['drafter’s likeliest', list(token.draft_alternatives)]);
  if (token.p === undefined && !request.header.machine.imported && !request.withheld) facts.push(['note', 'probabilities stand in traces of level full (--trace-level full)']);
  return facts;
}

export const legend = (...roles) => h('ul', { class: 'legend', 'aria-label': 'roles of tokens' }, roles.map((role) =>
  h('li', null, h('span', { class: role === 'rejected' || role === 'discarded' ? `guess ${role}` : `tok ${role}` }, role), h('span', { class: 'quiet' }, ROLE_NAMES[role].split(':')[1]))));

export const textView = {
  id: 'text', title: 'Text',
  draw(ctx) {
    const { trace, request, state } = ctx, rounds = request.rounds;
    const facts = h('dl', { class: 'facts', id: 'token-facts', 'aria-live': 'polite' }, h('dt', null, 'token'), h('dd', null, 'Point at one, or walk with the arrow keys.'));
    const blocks = [];
    const fill = (block, from) => block.replaceChildren(
      ...(from === 0 ? [prefillSpan(trace, request)] : []).filter(Boolean),
      ...rounds.slice(from, from + BLOCK).flatMap((_, k) => roundSpans(trace, request, from + k, state.unfold)));
    const text = h('div', { class: 'text', id: 'text', tabindex: '0', role: 'group', 'aria-label': 'generated text; arrow keys walk through its tokens' });
    for (let from = 0; from === 0 || from < rounds.length; from += BLOCK) blocks.push(h('div', { class: 'block', data: { from } }));
    text.append(...blocks);
    let now = ctx;
    const near = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting, boundingClientRect }) => {
      if (isIntersecting && !target.firstChild) { fill(target, Number(target.dataset.from)); target.style.removeProperty('min-height'); follow(now); }
      else if (!isIntersecting && target.firstChild) { target.style.setProperty('min-height', `${boundingClientRect.height}px`); target.replaceChildren(); }
    }), { rootMargin: '800px' });
    const watch = () => { if (blocks.length > 1) blocks.forEach((block) => near.observe(block)); };
    if (blocks.length > 1) blocks.forEach((block) => block.style.setProperty('min-height', '800px')); else fill(blocks[0], 0);
    watch();
    const print = () => {                // paper has the whole text
      near.disconnect();
      blocks.forEach((block) => { if (!block.firstChild) fill(block, Number(block.dataset.from)); block.style.removeProperty('min-height'); });
      follow(now);
    };
    window.addEventListener('beforeprint', print);
    window.addEventListener('afterprint', watch);

    const show = (span) => {
      const [ordinal, j] = [Number(span.dataset.round), Number(span.dataset.token)];
      text.querySelector('.tok.here')?.classList.remove('here');
      span.classList.add('here');
      facts.replaceChildren(...tokenFacts(trace, request, ordinal, j).flatMap(([name, value]) => [h('dt', null, name), h('dd', null, value)]),
        ...(ordinal < 0 ? [] : [h('dt', null, 'look'), h('dd', null, h('a', { href: ctx.link('tree', { round: ordinal }) }, 'at its round'), ' · ',
          h('a', { href: ctx.link('verification', { round: ordinal, token: j }) }, 'at how it was judged'))]));
    };
    const from = (event) => event.target.closest?.('[data-round]');
    text.addEventListener('mouseover', (event) => { const span = from(event); if (span) show(span); });
    text.addEventListener('click', (event) => {
      const span = from(event);
      if (!span) return;
      show(span);
      if (Number(span.dataset.round) >= 0 && !state.unfold) toggle(text, span, trace, request);
    });
    text.addEventListener('keydown', (event) => {
      const all = [...text.querySelectorAll('.tok')], at = all.findIndex((span) => span.classList.contains('here'));
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (event.key === 'Enter' && at >= 0) { event.preventDefault(); all[at].click(); }
      if (!step || !all.length) return;
      event.preventDefault();
      event.stopPropagation();
      const next = all[Math.max(0, Math.min(all.length - 1, at + step))];
      show(next);
      next.scrollIntoView({ block: 'nearest' });
    });
    const follow = (next) => {
      now = next;
      text.querySelectorAll('[data-round], [data-of]').forEach((span) => span.classList.toggle('future', Number(span.dataset.round ?? span.dataset.of) >= now.cursor));
    };
    this.follow = follow;
    this.leave = () => {
      near.disconnect();
      window.removeEventListener('beforeprint', print);
      window.removeEventListener('afterprint', watch);
    };
    follow(ctx);
    const unfold = button(state.unfold ? 'Hide the guesses that failed' : 'Show the guesses that failed', () => { state.unfold = !state.unfold; ctx.redraw(); }, { 'aria-pressed': String(Boolean(state.unfold)) });
    return [panel('Text', h('div', { class: 'bar' }, unfold), legend('accepted', 'correction', 'bonus', 'plain', 'prefill', 'rejected', 'discarded'),
      request.header.vocabulary ? null : h('p', { class: 'quiet' }, 'This trace carries no token texts (level summary): each piece is one round, with its number of tokens.'),
      h('div', { class: 'split' }, text, h('aside', { class: 'card', 'aria-label': 'about the token' }, facts)))];
  },
};

function toggle(text, span, trace, request) {
  const ordinal = span.dataset.round, shown = text.querySelectorAll(`.guess[data-of="${ordinal}"]`);
  if (shown.length) { shown.forEach((one) => one.remove()); return; }
  const own = text.querySelectorAll(`.tok[data-round="${ordinal}"]`), lost = guesses(trace, request, Number(ordinal));
  own[own.length - 1].before(...lost);
}
