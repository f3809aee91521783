// Token texts of a request, and words for its rounds. A character that spans tokens is shown with the token that completes it.

import { label } from './dom.js';

const BROKEN = '\ufffd';

/**
 * The texts of tokens whose joint text is known, plus what is left over for the tokens that follow.
 * `pieces` are the tokens' own texts; broken ones wait (shown as "") until the text shows what they were part of.
 */
export function assign(pieces, text) {
  const out = pieces.map(() => '');
  let cursor = 0;
  pieces.forEach((piece, i) => {
    if (!piece.includes(BROKEN)) {
      const found = text.startsWith(piece, cursor) ? cursor : text.indexOf(piece, cursor);
      if (piece && found >= cursor && found - cursor <= 16) {
        if (found > cursor && i) out[i - 1] += text.slice(cursor, found);
        else if (found > cursor) out[i] = text.slice(cursor, found);
        cursor = found + piece.length;
      }
      out[i] += piece;
      return;
    }
    const next = pieces.slice(i + 1).find((later) => later && !later.includes(BROKEN));
    const last = i + 1 === pieces.length || !pieces[i + 1].includes(BROKEN);
    if (!last) return;
    const until = next === undefined ? text.length : text.indexOf(next, cursor);
    if (until > cursor) { out[i] = text.slice(cursor, until); cursor = until; }
  });
  return out;
}

/** The shown text of each emitted token of a round; null where the trace has no vocabulary, as at level summary. */
export function roundWords(trace, request, record) {
  if (!request.header.vocabulary) return null;
  return assign(record.tokens.map((token) => trace.piece(token.token, request)), record.text);
}

/** For each emitted token the drafted node at its place that the walk judged: [{token, node, siblings}]. */
export function walk(record) {
  const children = new Map();
  record.nodes.forEach((node, i) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(i);
  });
  let at = -1;
  return record.tokens.map((token) => {
    const siblings = at === null ? [] : children.get(at) ?? [];
    const node = siblings.find((i) => record.nodes[i].fate === 'accepted' && record.nodes[i].token === token.token);
    at = node ?? null;
    return { token, node: node ?? null, siblings };
  });
}

/** Why a round was as deep as it was; empty where the trace does not tell. */
export const reasons = (record) => [record.reason, record.draft_reason].filter(Boolean).map((text) => label(text, 200)).join('; ');

/** Why a request shows no round. */
export function roundless({ done, tokens, totals }) {
  if (totals) return 'This trace has no rounds of this request, only its totals.';
  if (!done) return 'No round has run yet.';
  return tokens ? 'The text ended at its first token, which reading the prompt gives: there was nothing to guess.' : `It ended (${label(done.finish)}) before its first token.`;
}

export const ROLE_NAMES = {
  prefill: 'prefill: the first token, from reading the prompt', accepted: 'accepted: guessed, and the target agreed',
  correction: 'correction: the target’s token after a rejected guess', bonus: 'bonus: the target’s token after all guesses stood',
  plain: 'plain: no guess was made', rejected: 'rejected: the first guess that failed', discarded: 'discarded: behind it, or another guess at its place stood',
};
