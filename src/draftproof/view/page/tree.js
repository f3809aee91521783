// The candidate tree of one round: the path that stood, what was pruned, and the probabilities.

import { chance, counted, h, label, panel, svg, table } from './dom.js';
import { ROLE_NAMES, reasons, roundless } from './words.js';

const WIDTH = 130, HEIGHT = 44, MOST = 400;

/** Column and line of every node: depth to the right, leaves downward, parents in the middle of their children. */
export function layout(nodes) {
  const children = nodes.map(() => []), roots = [], depth = nodes.map(() => 0), line = nodes.map(() => 0);
  nodes.forEach((node, i) => {
    depth[i] = node.parent < 0 ? 1 : depth[node.parent] + 1;
    (node.parent < 0 ? roots : children[node.parent]).push(i);
  });
  // leaves in the order of a walk down the tree, then parents from the last to the first, since parents come before their children
  let leaves = 0;
  const stack = [...roots].reverse();
  while (stack.length) {
    const i = stack.pop();
    if (children[i].length) stack.push(...[...children[i]].reverse());
    else line[i] = leaves++;
  }
  for (let i = nodes.length - 1; i >= 0; i--) if (children[i].length) line[i] = (line[children[i][0]] + line[children[i].at(-1)]) / 2;
  return { depth, line, leaves: Math.max(1, leaves), root: roots.length ? (line[roots[0]] + line[roots.at(-1)]) / 2 : 0 };
}

export function drawTree(trace, request, record) {
  const nodes = record.nodes.slice(0, MOST), { depth, line, leaves, root } = layout(nodes);
  const x = (d) => 20 + d * (WIDTH + 24), y = (l) => 16 + l * (HEIGHT + 10);
  const deepest = nodes.length ? depth.reduce((a, b) => Math.max(a, b)) : 0, own = record.tokens.at(-1), kept = record.tokens.filter((token) => token.role === 'accepted').length;
  const size = [x(deepest + 2), y(leaves) + 10];
  const edges = nodes.map((node, i) => {
    const [x0, y0] = node.parent < 0 ? [x(0) + WIDTH, y(root) + HEIGHT / 2] : [x(depth[node.parent]) + WIDTH, y(line[node.parent]) + HEIGHT / 2];
    const [x1, y1] = [x(depth[i]), y(line[i]) + HEIGHT / 2];
    return svg('path', { class: `edge ${node.fate}`, d: `M${x0} ${y0}C${x0 + 12} ${y0} ${x1 - 12} ${y1} ${x1} ${y1}` });
  });
  const box = (cx, cy, kind, top, under) => svg('g', { class: `node ${kind}`, transform: `translate(${cx} ${cy})` },
    svg('rect', { width: WIDTH, height: HEIGHT, rx: kind === 'discarded' ? 0 : 8 }), svg('text', { x: 8, y: 18 }, top), svg('text', { x: 8, y: 35, class: 'small' }, under));
  const glyph = { accepted: '■ ', rejected: '× ', discarded: '· ' };
  const boxes = nodes.map((node, i) => box(x(depth[i]), y(line[i]), node.fate, glyph[node.fate] + label(trace.piece(node.token, request), 13),
    node.p === undefined ? node.fate : `p ${chance(node.p)} q ${chance(node.q)}`));
  const path = nodes.findLastIndex((node) => node.fate === 'accepted');
  if (own && own.role !== 'accepted') {
    const at = kept && path >= 0 ? [depth[path] + 1, line[path]] : [1, root];
    const busy = nodes.some((node, i) => depth[i] === at[0] && Math.abs(line[i] - at[1]) < 1);
    const place = [x(at[0]), busy ? y(leaves) : y(at[1])];
    if (busy) size[1] += HEIGHT + 10;
    const [x0, y0] = at[0] === 1 ? [x(0) + WIDTH, y(root) + HEIGHT / 2] : [x(depth[path]) + WIDTH, y(line[path]) + HEIGHT / 2];
    edges.push(svg('path', { class: 'edge', d: `M${x0} ${y0}C${x0 + 12} ${y0} ${place[0] - 12} ${place[1] + HEIGHT / 2} ${place[0]} ${place[1] + HEIGHT / 2}` }));
    boxes.push(box(...place, own.role, (own.role === 'bonus' ? '+ ' : '→ ') + label(trace.piece(own.token, request), 13), own.p === undefined ? own.role : `${own.role}, p ${chance(own.p)}`));
  }
  return svg('svg', { class: 'tree', width: size[0], height: size[1], viewBox: `0 0 ${size[0]} ${size[1]}`, role: 'img', 'aria-label': `candidate tree of round ${record.round}; the table below says the same` },
    edges, box(x(0), y(root), 'root', 'text so far', `position ${record.position - 1}`), boxes);
}

export const treeView = {
  id: 'tree', title: 'Tree',
  draw(ctx) {
    const place = h('div'), paint = ({ trace, request, cursor, link }) => {
      const ordinal = Math.max(0, cursor - 1), i = request.rounds[ordinal];
      if (i === undefined) return place.replaceChildren(h('p', null, roundless(request)));
      const record = trace.record(i), shape = record.nodes.every((node, k) => node.parent === k - 1) ? 'a chain' : 'a tree', why = reasons(record);
      const said = record.nodes.length ? `Round ${record.round}: ${shape} of ${counted(record.nodes.length, 'guess', 'guesses')} by ${label(record.drafter)}, of which ${trace.accepted.at(i)} stood. Depth granted: ${record.depth}${why && ` (${why})`}.`
        : `Round ${record.round}: nothing was guessed (${why || 'no reason given'}).`;
      const extra = record.nodes.length > MOST ? ` Drawn are the first ${MOST}.` : '';
      return place.replaceChildren(h('p', { 'aria-live': 'polite' }, said + extra), h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'drawing of the tree' }, drawTree(trace, request, record)),
        h('p', { class: 'quiet' }, '■ accepted, × rejected, · discarded, → correction, + bonus. The thick line is the path that stood; p is the target’s probability of a token, q the drafter’s.'),
        h('p', null, h('a', { href: link('verification', { round: ordinal, token: 0 }) }, 'How its tokens were judged')),
        table('guesses of the round', ['guess', 'parent', 'token', 'fate', 'p', 'q', 'noise', 'coin', 'score'], record.nodes.slice(0, MOST).map((node, k) =>
          [k, node.parent < 0 ? 'text' : node.parent, label(trace.piece(node.token, request)), h('span', { title: ROLE_NAMES[node.fate] }, node.fate), chance(node.p), chance(node.q), node.noise?.toFixed(2) ?? '–', chance(node.coin), node.score?.toFixed(3) ?? '–'])),
        table('what became text', ['token', 'role', 'p'], record.tokens.map((token) => [label(trace.piece(token.token, request)), token.role, chance(token.p)])));
    };
    paint(ctx);
    this.follow = paint;
    return [panel('Tree of a round', place)];
  },
};
