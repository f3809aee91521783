"""Charts of one round and of one token: the tree of guesses, and how the target judged them. They need a trace of level full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .style import Colours, title, words

MOST_NODES, MOST_CANDIDATES = 48, 9
GLYPHS = {"accepted": "■ ", "rejected": "× ", "discarded": "· ", "correction": "→ ", "bonus": "+ ", "plain": "", "root": ""}
STYLES = {"accepted": ("-", 2.4), "rejected": ("--", 1.4), "discarded": (":", 1.2), "correction": ("-", 2.0), "bonus": ("-", 2.0),
          "plain": ("-", 1.4), "root": ("-", 1.2)}
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08), "ncols": 2}        # of the axes, where no mark can lie under a legend

Piece = Callable[[int], str]


def layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, line) of every node: leaves one below the other in the order of a walk, parents in the middle of their children."""
    depth, line = [0] * len(parents), [0.0] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
        (roots if parent < 0 else children[parent]).append(node)
    stack, leaves = roots[::-1], 0
    while stack:
        node = stack.pop()
        if children[node]:
            stack += children[node][::-1]
        else:
            line[node] = leaves
            leaves += 1
    for node in reversed(range(len(parents))):                    # parents come before their children
        if children[node]:
            line[node] = (line[children[node][0]] + line[children[node][-1]]) / 2
    return depth, line


def tree_size(parents: Sequence[int]) -> float:
    """Inches of height for a tree."""
    _, line = layout(parents[:MOST_NODES])
    return 1.5 + 0.52 * (2 + max([0.0, *line]))


def tree(figure: Any, colours: Colours, data: Any) -> None:
    """(record of a round, piece): every guess where it was offered, the way that stood, and the target's own token."""
    record, piece = data
    axes = figure.subplots()
    nodes = record.nodes[:MOST_NODES]
    depth, line = layout([node.parent for node in nodes])
    roots = [line[i] for i, node in enumerate(nodes) if node.parent < 0]
    place = {-1: (0.0, (roots[0] + roots[-1]) / 2 if roots else 0.0), **{i: (float(depth[i]), line[i]) for i in range(len(nodes))}}
    for i, node in enumerate(nodes):
        edge(axes, colours, place[node.parent], place[i], node.fate)
        box(axes, colours, place[i], node.fate, words(piece(node.token), 13),
            node.fate if node.p is None else f"p {chance(node.p)}" + (f"  q {chance(node.q)}" if node.q is not None else ""))
    box(axes, colours, place[-1], "root", "text so far", f"position {record.position - 1}")
    own = record.tokens[-1] if record.tokens else None
    if own is not None and own.role != "accepted":
        last = max((i for i, node in enumerate(nodes) if node.fate == "accepted"), default=-1)
        x, y = place[last][0] + 1, place[last][1]
        if any(at == x and abs(height - y) < 0.95 for at, height in place.values()):
            y = max(height for _, height in place.values()) + 1
        edge(axes, colours, place[last], (x, y), own.role)
        box(axes, colours, (x, y), own.role, words(piece(own.token), 13), own.role if own.p is None else f"{own.role}, p {chance(own.p)}")
        place[len(nodes)] = (x, y)
    axes.set(xlim=(-0.45, max(5.0, *(x for x, _ in place.values())) + 0.45), ylim=(max(y for _, y in place.values()) + 0.5, -0.5))
    axes.set_axis_off()
    kept = sum(node.fate == "accepted" for node in record.nodes)
    chain = all(node.parent == i - 1 for i, node in enumerate(record.nodes))
    left_out = f"; drawn are the first {MOST_NODES}" if len(record.nodes) > MOST_NODES else ""
    legend = "  ".join(f"{GLYPHS[kind]}{kind}" for kind in ("accepted", "rejected", "discarded", "correction", "bonus"))
    what = f"{'a chain' if chain else 'a tree'} by {words(record.drafter, 30)}{left_out}.   {legend}"
    tokens = f"{len(record.tokens)} token{'s' if len(record.tokens) > 1 else ''}"
    title(axes, f"Round {record.round}: {kept} of {len(record.nodes)} guesses stood, {tokens} from one pass of the target", what, colours)


def edge(axes: Any, colours: Colours, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    line, width = STYLES[kind]
    x0, x1 = start[0] + 0.4, end[0] - 0.4
    curve = Path([(x0, start[1]), (x0 + 0.12, start[1]), (x1 - 0.12, end[1]), (x1, end[1])], [Path.MOVETO, *3 * [Path.CURVE4]])
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colours["quiet" if kind == "plain" else kind], linestyle=line,
                             linewidth=width, zorder=1))


def box(axes: Any, colours: Colours, at: tuple[float, float], kind: str, text: str, under: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    back = colours.get(f"{kind}-back", colours["paper"])
    line, width = STYLES[kind]
    axes.add_patch(FancyBboxPatch((at[0] - 0.37, at[1] - 0.33), 0.74, 0.66, boxstyle="round,pad=0.03,rounding_size=0.06", facecolor=back,
                                  edgecolor=colours.get(kind, colours["quiet"]), linestyle=line, linewidth=width, zorder=2,
                                  mutation_aspect=2.0))
    axes.text(at[0], at[1] - 0.13, GLYPHS[kind] + text, ha="center", va="center", fontsize=10.5, zorder=3,
              fontweight="bold" if kind in ("accepted", "correction", "bonus") else "normal")
    axes.text(at[0], at[1] + 0.18, under, ha="center", va="center", fontsize=8.5, color=colours["quiet"], zorder=3)


def chance(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0e}" if 0 < value < 0.001 else f"{value:.3f}"


def verification(figure: Any, colours: Colours, data: Any) -> None:
    """(record of a round, place of the token in it, `judged.Judgement`, piece): p and q of the candidates, and what decided."""
    record, place, judged, piece = data
    shown = judged.candidates[:MOST_CANDIDATES]
    laws, decision = figure.subplots(1, 2)
    lines = list(range(len(shown)))
    has_law = any(one.q is not None for one in shown)
    shift = 0.19 if has_law else 0.0
    laws.barh([line - shift for line in lines], [one.p or 0 for one in shown], height=0.36, color=colours["score"], label="p (target)")
    if has_law:
        laws.barh([line + shift for line in lines], [one.q or 0 for one in shown], height=0.36, color=colours["draft"], hatch="//",
                  edgecolor=colours["card"], label="q (drafter)")
    for line, one in zip(lines, shown, strict=True):
        text = f"{chance(one.p)} · {chance(one.q)}" if has_law else chance(one.p)
        end = max(one.p or 0, one.q or 0)
        laws.annotate(text, (end, line), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    height = max(len(shown), 4)
    widest = max([0.05, *(max(one.p or 0, one.q or 0) for one in shown)])
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if 5 * step >= widest)
    laws.set(yticks=lines, ylim=(height - 0.4, -0.6), xlim=(0, 1.35 * widest),
             xticks=[mark * step for mark in range(6) if mark * step <= 1])
    marks = [("★ " if one.emitted else "") + ("◇ " if one.drafted else "") for one in shown]
    laws.set_yticklabels([mark + words(piece(one.token), 14) for mark, one in zip(marks, shown, strict=True)])
    laws.legend(**BELOW)
    laws.xaxis.grid(True)
    emitted = words(piece(record.tokens[place].token), 16)
    heading = f"Round {record.round}, token {place + 1} of {len(record.tokens)}: {emitted}, {judged.role}"
    no_law = "; this drafter tells no q" if judged.guess is not None and not has_law else ""
    title(laws, heading, f"★ emitted  ◇ guessed{no_law}", colours)
    if judged.rule == "block" and judged.coin is not None:
        prefixes(decision, colours, record, piece)
    else:
        joint = judged.rule == "ratio" and judged.coin is not None
        (toss if joint else race)(decision, colours, judged, shown, height, [words(piece(one.token), 14) for one in shown])


def race(axes: Any, colours: Colours, judged: Any, shown: Sequence[Any], height: int, _: Sequence[str]) -> None:
    """Rule match: both models add the same noise to their logarithms; the largest sum wins."""
    ends: list[float] = []
    for name, colour, marker, line, shift in (("target", "score", "o", "-", -0.12), ("draft", "draft", "D", "--", 0.12)):
        known = [(getattr(one, name), place + shift) for place, one in enumerate(shown) if getattr(one, name) is not None]
        if known:
            ends += [value for value, _ in known]
            axes.scatter(*zip(*known, strict=True), color=colours[colour], marker=marker, s=52, zorder=3, edgecolor=colours["ink"],
                         linewidth=0.7, label="target: log p + g" if name == "target" else "drafter: log q + g")
            axes.axvline(max(known)[0], color=colours[colour], linewidth=1.2, linestyle=line, zorder=1)
    middle, half = (max(ends) + min(ends)) / 2, max(1.0, 0.6 * (max(ends) - min(ends)))
    axes.set(yticks=range(len(shown)), ylim=(height - 0.4, -0.6), xlim=(middle - half, middle + half))
    axes.set_yticklabels(["" if judged.greedy else f"g {one.g:+.2f}" for one in shown])
    axes.grid(True, axis="x")
    axes.legend(**BELOW)
    several = len(judged.guesses) > 1
    outcome = "nothing was guessed here" if judged.decisive is None else \
        f"{'one of the guesses' if several else 'the guess'} is the target’s choice: it stands" if judged.decisive.fate == "accepted" else \
        "the guesses are other tokens: they fall" if several else "the guess is another token: it falls"
    how = "temperature 0, no noise" if judged.greedy else "furthest right wins"
    heading = "The same noise for both models"
    if judged.rule.startswith("lossy"):
        heading, stood = "LOSSY: what the target finds typical stands", judged.decisive is not None and judged.decisive.fate == "accepted"
        outcome = f"p = {chance(judged.guess.p)}: typical, it stands" if stood else "no typical guess: the target’s own choice"
        how = "whatever the noise says" if stood else how
    title(axes, heading, f"{how}; {outcome}", colours)


def toss(axes: Any, colours: Colours, judged: Any, shown: Sequence[Any], height: int, names: Sequence[str]) -> None:
    """Rule ratio: the coin of the guess that stood, or of the first, against its limit; and what is left of p behind all."""
    one, several = judged.decisive, len(judged.guesses) > 1
    order = judged.guesses.index(one) + 1
    limit_name = ("p" if one.candidate.q is None else "min(1, p/q)") if order == 1 else f"limit of guess {order}"
    coin = axes.inset_axes([0, 0.74, 1, 0.17])
    marks = [(f"u = {one.coin:.3f}", one.coin, 0.62, 3)]
    if one.limit is not None:
        coin.barh(0, one.limit, color=colours["accepted-back"], edgecolor=colours["accepted"])
        coin.barh(0, 1 - one.limit, left=one.limit, color=colours["rejected-back"], edgecolor=colours["rejected"], hatch="///")
        marks.append((f"{limit_name} = {one.limit:.3f}", one.limit, -0.45, -13))
    else:
        marks.append((f"{limit_name}: the trace holds too little of p and q", 0.5, -0.45, -13))
    coin.plot([one.coin, one.coin], [-0.62, 0.62], color=colours["ink"], linewidth=2.4)
    for text, x, y, shift in marks:
        side = "left" if x < 0.2 else "right" if x > 0.8 else "center"
        coin.annotate(text, (x, y), xytext=(0, shift), textcoords="offset points", ha=side, fontsize=9.5)
    coin.set(xlim=(0, 1), ylim=(-0.8, 0.8))
    coin.set_axis_off()
    refused = sum(guess.limit is not None for guess in judged.guesses)
    residual = "residual max(0, p − q)" if not several else f"left of p behind {refused} refused"
    bars = axes.barh(range(len(shown)), judged.left[:len(shown)], height=0.5, color=colours["correction"])
    for line, (bar, at_most) in enumerate(zip(bars, judged.at_most, strict=False)):
        if at_most:                                          # the trace does not tell q, which may take some of it away
            bar.set(facecolor=colours["correction-back"], edgecolor=colours["correction"], hatch="///")
            axes.annotate(f"≤ {chance(judged.left[line])}", (judged.left[line], line), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=9)
    axes.set(yticks=range(len(shown)), ylim=(height - 0.4, -0.6 - 0.55 * height), xlabel=f"{residual}, of these candidates")
    axes.set_yticklabels(names)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    outcome = "u lies below: the guess stands" if one.fate == "accepted" else "u lies beyond: a draw from the residual replaces it"
    if several:
        outcome = f"guess {order} of {len(judged.guesses)}; " + (outcome if one.fate == "accepted" else "every u lies beyond its limit")
    title(axes, "A coin against p/q", outcome, colours)


def prefixes(axes: Any, colours: Colours, record: Any, piece: Piece) -> None:
    """Rule block: the coin of every prefix of the guess; their limits need whole laws, which no trace holds."""
    nodes = record.nodes[:MOST_CANDIDATES]
    for line, node in enumerate(nodes):
        axes.plot([node.coin], [line], marker="o" if node.fate == "accepted" else "X", markersize=9, color=colours[node.fate])
        axes.annotate(f"u = {node.coin:.3f}", (node.coin, line), xytext=(0, 9), textcoords="offset points", fontsize=9.5,
                      ha="left" if node.coin < 0.2 else "right" if node.coin > 0.8 else "center")
    axes.set(yticks=range(len(nodes)), ylim=(max(len(nodes), 4) - 0.4, -0.7), xlim=(-0.02, 1.02),
             xlabel="coin of the prefix that ends here")
    axes.set_yticklabels([f"{GLYPHS[node.fate]}{i}: {words(piece(node.token), 12)}" for i, node in enumerate(nodes, 1)])
    axes.grid(True, axis="x")
    stood = sum(node.fate == "accepted" for node in record.nodes)
    title(axes, "A coin for every prefix", f"the longest below its own limit stands: here {stood} of {len(record.nodes)} tokens", colours)
