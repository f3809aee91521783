"""What a pass over few rows computes on a GPU, in Triton (Tillet et al., MAPL 2019). `calls.py` says what each takes and returns.

A row's numbers do not depend on how many rows stand beside it (Law 2): every row is added up in the same order, by the same instructions or
by such as were seen to give the same bits (`calls.large`); tiles of queries have one size, and parts of a text lie on an absolute grid.

LINKED: kernels of one stream begin while the one before them ends (programmatic dependent launch, from compute capability 9.0 on). The
small ones let their successor begin at once, a product behind its loop; each waits before it touches what another writes, and asks before
that for what was there when the pass began: weights of norms, angles, how rows attend, and the lines of memory that keys lie in.

A mask joins vectors alone, a number by way of zeros: the interpreter of Triton 3.9 makes no mask of a vector's and a number's.
"""

import triton
import triton.language as tl

LINE = tl.constexpr(64)  # numbers of sixteen bits in a line of memory


@triton.jit
def _begin(LINKED: tl.constexpr):
    if LINKED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait(LINKED: tl.constexpr):
    if LINKED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _ask(at, LINKED: tl.constexpr):
    """Have these lines of memory brought into the second cache; nobody waits for them."""
    if LINKED:
        asked: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asked, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _weights(at, read, EIGHT: tl.constexpr):
    """A block of a matrix, nothing where it has ended. Those of eight bits become halves, which takes one instruction for two, and so rows
    come as halves."""
    b = tl.load(at, mask=read, other=0.0, eviction_policy="evict_first")
    if EIGHT:
        b = b.to(tl.float16)
    return b


@triton.jit
def _rounded(wide, like, HALVES: tl.constexpr):
    """float32 in the type of `like`; HALVES: cut into their range where another type is meant."""
    if HALVES:
        wide = tl.minimum(tl.maximum(wide, -65504.0), 65504.0)
    return wide.to(like.dtype.element_ty)


@triton.jit
def _finished(sums, steps, bias, n, here, EIGHT: tl.constexpr, BIASED: tl.constexpr):
    """Sums as the values of a product, float32."""
    if EIGHT:
        sums *= tl.load(steps + n, mask=here, other=0.0)[None, :]
    if BIASED:
        sums += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _gated(value, up, like, HALVES: tl.constexpr):
    """silu(value) · up, rounded as two operations of torch round it."""
    wide = value.to(tl.float32)
    return _rounded((wide / (1 + tl.exp(-wide))).to(value.dtype).to(tl.float32) * up.to(tl.float32), like, HALVES)


@triton.jit
def _read(x, m, at, rows, INPUTS: tl.constexpr, WHOLE: tl.constexpr):
    """Inputs `at` of rows m of x, nothing where there are no more."""
    inside = (m < rows)[:, None]
    if not WHOLE:
        inside = inside & (at < INPUTS)
    return tl.load(x + m.to(tl.int64)[:, None] * INPUTS + at, mask=inside, other=0.0)


@triton.jit
def _added(sums, others, x, m, at, rows, upper, lower, here, INPUTS: tl.constexpr, WHOLE: tl.constexpr, EIGHT: tl.constexpr,
           BOTH: tl.constexpr):
    """Sums with the products of inputs `at` of rows m, by weights of the upper matrix and, if BOTH, of the lower one."""
    read = here[:, None]
    if not WHOLE:
        read = read & (at < INPUTS)
    a = _read(x, m, at, rows, INPUTS, WHOLE)
    sums = tl.dot(a, _weights(upper + at, read, EIGHT).T, sums)
    if BOTH:
        others = tl.dot(a, _weights(lower + at, read, EIGHT).T, others)
    return sums, others


@triton.jit(do_not_specialize=["rows"])
def product(x, weight, steps, bias, out, rows, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, EIGHT: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr, LINKED: tl.constexpr):
    """A tile [BM, BN] of it. ADDED: out += x Wᵀ + b. GATED: out = silu(x Wᵀ + b) · (x Vᵀ + c), where V stands below W, and c behind b."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, here, below = tl.arange(0, BK), n < OUTPUTS, weight + OUTPUTS * INPUTS if GATED else weight
    WHOLE: tl.constexpr = INPUTS % BK == 0
    column = n.to(tl.int64)[:, None] * INPUTS
    sums, others = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    _wait(LINKED)
    for start in range(0, INPUTS, BK):
        at = start + k[None, :]
        sums, others = _added(sums, others, x, m, at, rows, weight + column, below + column, here, INPUTS, WHOLE, EIGHT, GATED)
    _begin(LINKED)  # not before: what came early would take the room of this one's own programs
    value = _rounded(_finished(sums, steps, bias, n, here, EIGHT, BIASED), out, EIGHT)
    if GATED:
        value = _gated(value, _rounded(_finished(others, steps + OUTPUTS, bias + OUTPUTS, n, here, EIGHT, BIASED), out, EIGHT), out, EIGHT)
    place = m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    inside = (m < rows)[:, None] & here[None, :]
    if ADDED:
        value = (tl.load(out + place, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
    tl.store(out + place, value, mask=inside)


@triton.jit
def gate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, LINKED: tl.constexpr):
    """silu of the first half of a row of 2 WIDTH numbers, times the second: BLOCK of them."""
    _begin(LINKED)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, inside = both + row * (2 * WIDTH) + at, at < WIDTH
    _wait(LINKED)
    value, up = tl.load(first, mask=inside, other=0.0), tl.load(first + WIDTH, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + at, _gated(value, up, out, HALVES), mask=inside)


@triton.jit
def norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, LINKED: tl.constexpr):
    """A row of RMSNorm (Zhang & Sennrich, arXiv 1910.07467), rounded where the transformers modules round."""
    _begin(LINKED)
    at = tl.arange(0, BLOCK)
    inside, row = at < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH
    factor = tl.load(weight + at, mask=inside, other=0.0)
    _wait(LINKED)
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = (value.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)
    tl.store(out + row + at, _rounded(value, out, HALVES), mask=inside)


@triton.jit
def _turned(one, two, cos_one, cos_two, sin_one, sin_two, kind: tl.constexpr):
    """The halves of heads, turned, rounded where the transformers modules round."""
    left = (one * cos_one).to(kind).to(tl.float32) + (two * sin_one).to(kind).to(tl.float32)
    right = (two * cos_two).to(kind).to(tl.float32) + (one * sin_two).to(kind).to(tl.float32)
    return left.to(kind), right.to(kind)


@triton.jit(do_not_specialize=["rows"])
def heads(x, weight, steps, bias, angles, write_to, out, keys, values, rows, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
          INPUTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EIGHT: tl.constexpr, BIASED: tl.constexpr,
          LINKED: tl.constexpr):
    """`product` and `turn` in one, BN outputs and those half a head behind them: queries go to out, keys and values of each row to a place
    of its own in the cache, −1 for none."""
    OUTPUTS: tl.constexpr = (HEADS + 2 * KV) * DIM
    HALF: tl.constexpr = DIM // 2
    WHOLE: tl.constexpr = INPUTS % BK == 0
    m, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN // HALF
    at, k = tl.program_id(1) * BN % HALF + tl.arange(0, BN), tl.arange(0, BK)
    n, inside = head * DIM + at, (m < rows)[:, None]
    column, here, row = n.to(tl.int64)[:, None] * INPUTS, n < OUTPUTS, m.to(tl.int64)[:, None]
    sums, others = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    _wait(LINKED)
    # after it: the kernel before the norm may be the one that looks the angles up, and the sums are waited for longer
    below, target = weight + HALF * INPUTS, tl.load(write_to + m, mask=m < rows, other=-1).to(tl.int64)[:, None]
    turns, cos = inside & (tl.zeros_like(m) + head < HEADS + KV)[:, None], angles + row * (2 * DIM) + at[None, :]
    sin = cos + DIM
    cos_one, cos_two = tl.load(cos, mask=turns, other=0.0).to(tl.float32), tl.load(cos + HALF, mask=turns, other=0.0).to(tl.float32)
    sin_one, sin_two = tl.load(sin, mask=turns, other=0.0).to(tl.float32), tl.load(sin + HALF, mask=turns, other=0.0).to(tl.float32)
    for start in range(0, INPUTS, BK):
        inputs = start + k[None, :]
        sums, others = _added(sums, others, x, m, inputs, rows, weight + column, below + column, here, INPUTS, WHOLE, EIGHT, True)
    _begin(LINKED)
    one = _rounded(_finished(sums, steps, bias, n, here, EIGHT, BIASED), out, EIGHT)
    two = _rounded(_finished(others, steps, bias, n + HALF, here, EIGHT, BIASED), out, EIGHT)
    left, right = _turned(one.to(tl.float32), two.to(tl.float32), cos_one, cos_two, sin_one, sin_two, out.dtype.element_ty)
    if head < HEADS:
        place = row * OUTPUTS + n[None, :]
        tl.store(out + place, left, mask=inside)
        tl.store(out + place + HALF, right, mask=inside)
    else:
        inside = inside & (target >= 0)
        cell = target * (KV * DIM) + ((head - HEADS) % KV) * DIM + at[None, :]
        if head < HEADS + KV:
            tl.store(keys + cell, left, mask=inside)
            tl.store(keys + cell + HALF, right, mask=inside)
        else:
            tl.store(values + cell, one, mask=inside)
            tl.store(values + cell + HALF, two, mask=inside)


@triton.jit(do_not_specialize=["rows", "writes"])
def turn(heads, angles, factors, eps, write_to, write_from, keys, values, rows, writes, HEADS: tl.constexpr, KV: tl.constexpr,
         DIM: tl.constexpr, HALF: tl.constexpr, SOME: tl.constexpr, NORMED: tl.constexpr, LINKED: tl.constexpr):
    """Turn the queries of a row in place, and a write's keys into the cache, beside its values: SOME heads of one of them. A write to −1
    is none."""
    _begin(LINKED)
    place, head, at = tl.program_id(0), tl.program_id(1) * SOME + tl.arange(0, SOME), tl.arange(0, HALF)
    here = place + tl.zeros_like(head)
    asks, holds = (head < HEADS) & (here < rows), (head >= HEADS) & (head < HEADS + KV) & (here < writes)
    source = tl.load(write_from + place, mask=place < writes, other=0)
    target = tl.load(write_to + place, mask=place < writes, other=-1).to(tl.int64)
    holds = holds & (target + tl.zeros_like(head) >= 0)
    row = tl.where(head < HEADS, place, source).to(tl.int64)[:, None]
    inside = (asks | holds)[:, None] & (at < DIM // 2)[None, :]
    first = heads + row * ((HEADS + 2 * KV) * DIM) + head[:, None] * DIM + at[None, :]
    kind = heads.dtype.element_ty
    cos = angles + row * (2 * DIM) + at[None, :]
    sin = cos + DIM
    cos_one, cos_two = tl.load(cos, mask=inside, other=0.0).to(tl.float32), tl.load(cos + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    sin_one, sin_two = tl.load(sin, mask=inside, other=0.0).to(tl.float32), tl.load(sin + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    _wait(LINKED)
    one, two = tl.load(first, mask=inside, other=0.0).to(tl.float32), tl.load(first + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / DIM + eps)[:, None]
        factor = factors + head[:, None] * DIM + at[None, :]
        one = ((one * scale).to(kind).to(tl.float32) * tl.load(factor, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        two = ((two * scale).to(kind).to(tl.float32)
               * tl.load(factor + DIM // 2, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    left, right = _turned(one, two, cos_one, cos_two, sin_one, sin_two, kind)
    queries, stored = inside & asks[:, None], inside & holds[:, None]
    tl.store(first, left, mask=queries)
    tl.store(first + DIM // 2, right, mask=queries)
    cell = target * (KV * DIM) + (head - HEADS)[:, None] * DIM + at[None, :]
    tl.store(keys + cell, left, mask=stored)
    tl.store(keys + cell + DIM // 2, right, mask=stored)
    tl.store(values + cell, tl.load(first + KV * DIM, mask=stored, other=0.0), mask=stored)
    tl.store(values + cell + DIM // 2, tl.load(first + KV * DIM + DIM // 2, mask=stored, other=0.0), mask=stored)


@triton.jit(do_not_specialize=["window", "rows", "wide", "most", "tiles"])
def attend(heads, keys, values, position, take, table, sight, out, logs, scale, window, rows, wide, most, tiles, STRIDE: tl.constexpr,
           KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DEEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
           SPLIT: tl.constexpr, QUERIES: tl.constexpr, WINDOWED: tl.constexpr, SIGHTED: tl.constexpr, LINKED: tl.constexpr):
    """One tile of queries, one key head, SPLIT blocks of keys (Dao et al., arXiv 2205.14135): a part's average, and its log₂-sum.
    wide: heads of a row of out and logs; KV: key heads of a place. SIGHTED: bits of a row's sight say which of the 128 keys behind its
    position it sees."""
    _begin(LINKED)
    tile, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SEATS: tl.constexpr = QUERIES // GROUP
    query, d, key = tl.arange(0, QUERIES), tl.arange(0, DEEP), tl.arange(0, BLOCK)
    seat = query // GROUP
    row = tl.load(take + tile * SEATS + seat, mask=seat < SEATS, other=-1).to(tl.int64)
    sits, deep = row >= 0, (d < DIM)[None, :]
    at, there = tl.load(position + row, mask=sits, other=-1).to(tl.int32), sits[:, None] & deep
    first, cells = part * SPLIT, ()
    for i in tl.static_range(SPLIT):
        start = (first + i) * BLOCK
        page = tl.load(table + tile // tiles * most + start // PAGE, mask=start // PAGE < most, other=0).to(tl.int64)
        cells += ((page * PAGE + start % PAGE) * (KV * DIM) + kv * DIM,)
    seen = first * BLOCK <= tl.max(at, 0) + (128 if SIGHTED else 0)  # not where nobody sits
    if WINDOWED:
        seen = seen & ((first + SPLIT) * BLOCK > tl.min(tl.where(sits, at, most * PAGE), 0) - window + 1)
    if seen:
        line = tl.arange(0, (DEEP + LINE - 1) // LINE) * LINE
        for i in tl.static_range(SPLIT):
            lines = cells[i] + key[:, None] * (KV * DIM) + tl.minimum(line, DIM - 1)[None, :]
            _ask(keys + lines, LINKED)
            _ask(values + lines, LINKED)
    _wait(LINKED)
    if SIGHTED:
        low, high = tl.load(sight + 2 * row, mask=sits, other=0), tl.load(sight + 2 * row + 1, mask=sits, other=0)
    head = kv * GROUP + query % GROUP
    asked = tl.load(heads + row[:, None] * STRIDE + head[:, None] * DIM + d[None, :], mask=there, other=0.0)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, DEEP), tl.float32)
    if seen:
        for i in tl.static_range(SPLIT):
            start = (first + i) * BLOCK
            cell = cells[i] + (key[:, None] * (KV * DIM) + d[None, :])
            k, v = tl.load(keys + cell, mask=deep, other=0.0), tl.load(values + cell, mask=deep, other=0.0)
            here = (start + key)[None, :]
            sees = here <= at[:, None]
            if WINDOWED:
                sees = sees & (here > at[:, None] - window)
            if SIGHTED:
                behind = here - at[:, None] - 1
                bits = tl.where(behind < 64, low[:, None], high[:, None]) >> (behind & 63)
                sees = sees | ((behind >= 0) & (behind < 128) & sits[:, None] & ((bits & 1) == 1))
            scores = tl.where(sees, tl.dot(asked, k.T) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            sums = tl.dot(weights.to(asked.dtype), v, sums * fade[:, None])
            top = higher
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    place = (part.to(tl.int64) * rows + row) * wide + head
    tl.store(out + place[:, None] * DIM + d[None, :], sums.to(out.dtype.element_ty), mask=there)
    tl.store(logs + place, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=sits)


@triton.jit(do_not_specialize=["rows", "wide", "parts"])
def merge(parts_out, logs, out, rows, wide, parts, STRIDE: tl.constexpr, DIM: tl.constexpr, DEEP: tl.constexpr, SOME: tl.constexpr,
          LINKED: tl.constexpr):
    """Join the parts of one head of one row, SOME at a time. A part that nothing was seen of weighs exactly nothing; not all are.
    wide: heads of a row of the parts; STRIDE: numbers of one of out, which may have more heads."""
    _begin(LINKED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, d = tl.arange(0, SOME), tl.arange(0, DEEP)
    deep = d < DIM
    _wait(LINKED)
    top, total, sums = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32), tl.zeros((DEEP,), tl.float32)
    for start in range(0, parts, SOME):
        here = start + part < parts
        place = ((start + part) * rows + row) * wide + head
        log = tl.load(logs + place, mask=here, other=float("-inf"))
        average = tl.load(parts_out + place[:, None] * DIM + d[None, :], mask=here[:, None] & deep[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(log, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a window may begin behind all parts so far
        weight, fade = tl.exp2(log - base), tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(weight[:, None] * average, 0)
        top = higher
    tl.store(out + row * STRIDE + head * DIM + d, (sums / total).to(out.dtype.element_ty), mask=deep)


@triton.jit(do_not_specialize=["moves"])
def move(stores, source, target, moves, kind, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, LINKED: tl.constexpr):
    """Rows of WIDTH numbers to other places of the same store, SOME of them, in each of many stores of one type, which `kind` points at:
    no row that is read is written."""
    _begin(LINKED)
    _wait(LINKED)
    store = tl.load(stores + tl.program_id(1)).to(kind.dtype)
    move, at = tl.program_id(0) * SOME + tl.arange(0, SOME), tl.arange(0, BLOCK)
    inside = (move < moves)[:, None] & (at < WIDTH)[None, :]
    read = tl.load(source + move, mask=move < moves, other=0).to(tl.int64)[:, None] * WIDTH + at[None, :]
    written = tl.load(target + move, mask=move < moves, other=0).to(tl.int64)[:, None] * WIDTH + at[None, :]
    tl.store(store + written, tl.load(store + read, mask=inside, other=0.0), mask=inside)
