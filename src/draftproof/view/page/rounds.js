// One line a round. Only the lines in sight exist; the list is as tall as all of them.

import { h, label, panel, seconds } from './dom.js';
import { PHASES } from './tally.js';
import { reasons, roundWords } from './words.js';

const ROW = 30, EXTRA = 12;
const GLYPH = { accepted: '■', rejected: '×', discarded: '·' };

function line(ctx, ordinal) {
  const { trace, request, link, cursor } = ctx, i = request.rounds[ordinal], record = trace.record(i);
  const words = roundWords(trace, request, record), last = record.tokens.at(-1), own = last && last.role !== 'accepted' ? last : null;
  const nodes = record.nodes.slice(0, 24), why = reasons(record);
  const spoken = `round ${record.round}: ${record.nodes.length} guessed, ${trace.accepted.at(i)} accepted${own ? `, then ${own.role}` : ''}; depth granted: ${record.depth}${why && ` (${why})`}`;
  const row = h('a', { class: 'row', href: link('tree', { round: ordinal }), title: spoken, 'aria-current': ordinal === cursor - 1 ? 'true' : null },
    h('span', { class: 'num' }, record.round), h('span', { class: 'num' }, `${trace.accepted.at(i)}/${record.nodes.length}`),
    h('span', { class: 'cells' }, nodes.map((node) => h('span', { class: `cell ${node.fate}` }, GLYPH[node.fate], ' ', request.header.vocabulary ? label(trace.piece(node.token, request), 12) : '')),
      record.nodes.length > 24 ? ` +${record.nodes.length - 24}` : '',
      own ? h('span', { class: `cell tok ${own.role}` }, own.role === 'bonus' ? '+ ' : own.role === 'correction' ? '→ ' : '', words ? label(words.at(-1) || '·', 16) : label(record.text, 16)) : null),
    PHASES.map((name) => h('span', { class: 'num wide' }, seconds(trace[name].at(i)))));
  row.style.setProperty('top', `${ordinal * ROW}px`);
  return row;
}

export const roundsView = {
  id: 'rounds', title: 'Rounds',
  draw(ctx) {
    const count = () => ctx.request.rounds.length;
    const all = h('div', { class: 'tall', role: 'group', 'aria-label': 'rounds' });
    const frame = h('div', { class: 'list', id: 'rounds', tabindex: '0', role: 'region', 'aria-label': 'list of rounds; scroll with the arrow keys' }, all);
    let shown = new Map(), painted = '';
    const paint = () => {
      const first = Math.floor(frame.scrollTop / ROW), from = Math.max(0, first - EXTRA), to = Math.min(count(), first + Math.ceil((frame.clientHeight || 600) / ROW) + 1 + EXTRA);
      if (painted === `${from} ${to} ${count()}`) return;
      painted = `${from} ${to} ${count()}`;
      all.style.setProperty('height', `${count() * ROW}px`);
      const next = new Map();
      for (let n = from; n < to; n++) next.set(n, shown.get(n) ?? line(ctx, n));
      for (const [n, row] of shown) if (!next.has(n)) row.remove();
      let after = null;                   // in the order of the rounds, for who reads or tabs through them; what stays keeps its focus
      for (const row of [...next.values()].reverse()) {
        if (row.parentNode !== all) all.insertBefore(row, after);
        after = row;
      }
      shown = next;
    };
    let asked = false;
    frame.addEventListener('scroll', () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; paint(); });
    }, { passive: true });
    this.follow = (next) => {
      ctx = next;
      const top = (ctx.cursor - 1) * ROW;
      if (top < frame.scrollTop || top > frame.scrollTop + frame.clientHeight - ROW) frame.scrollTop = Math.max(0, top - frame.clientHeight / 2);
      paint();
      for (const [n, row] of shown) if (n === ctx.cursor - 1) row.setAttribute('aria-current', 'true'); else row.removeAttribute('aria-current');
    };
    requestAnimationFrame(() => this.follow(ctx));
    paint();
    return [panel('Rounds', h('p', { class: 'quiet' }, `${count().toLocaleString('en-US')} rounds. ■ accepted, × rejected, · discarded, → correction, + bonus. A line opens its tree.`),
      h('div', { class: 'row head', 'aria-hidden': 'true' }, h('span', { class: 'num' }, 'round'), h('span', { class: 'num' }, 'stood'), h('span', { class: 'cells' }, 'guesses, and the target’s own token'),
        PHASES.map((name) => h('span', { class: 'num wide' }, name))), frame)];
  },
};
