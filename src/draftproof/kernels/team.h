/* Threads that go through the same lines together, each with its share of the work. OpenMP starts them; where one needs what others made,
 * all `join`: fifty nanoseconds where OpenMP's own barrier takes two hundred and the end of a region and the next one's start five hundred.
 */
#include <omp.h>
#include <sched.h>

#define PATIENCE 1000 /* looks: then others may have the processor, as whoever is missing may wait for this one */

typedef struct {
    _Alignas(64) long arrived, next; /* next: the piece of work that nobody has taken */
    _Alignas(64) unsigned joined;    /* how often, in a line of its own: others watch it */
} team;

typedef struct {
    team *all;
    long index, of; /* which thread this is, of how many */
} member;

/* Wait for all, and see what they made. Work in pieces begins anew. */
static inline void join(const member *me)
{
    team *all = me->all;
    unsigned before = __atomic_load_n(&all->joined, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&all->arrived, 1, __ATOMIC_ACQ_REL) == me->of) {
        all->arrived = all->next = 0;
        __atomic_store_n(&all->joined, before + 1, __ATOMIC_RELEASE);
        return;
    }
    for (long looks = 0; __atomic_load_n(&all->joined, __ATOMIC_ACQUIRE) == before; looks++) {
        if (looks > PATIENCE) sched_yield();
#if defined __x86_64__
        else __builtin_ia32_pause();
#elif defined __aarch64__
        else __asm__ volatile("isb" ::: "memory"); /* waits where `yield` does nothing */
#endif
    }
}

/* One's share of `count` pieces: from which on. The share of the member behind begins where it ends. */
static inline long share(const member *me, long count, long ahead) { return count * (me->index + ahead) / me->of; }

/* The next of the pieces that differ, or, as others go at their own speed, one behind the last. */
static inline long taken(const member *me) { return __atomic_fetch_add(&me->all->next, 1, __ATOMIC_RELAXED); }

/* i: one's pieces of `count`. */
#define MINE(i, count) for (long i = share(me, count, 0), i##_end = share(me, count, 1); i < i##_end; i++)

/* The piece behind i, of `count`: one's share of the first `own`, then whatever of the others nobody has taken. */
static inline long after(const member *me, long i, long own, long count)
{
    return i + 1 < share(me, own, 1) ? i + 1 : own < count ? own + taken(me) : count;
}

/* i: of `count` pieces one's share of `own`, and then, where cores differ or other programs run, as many as one has time for. */
#define MOSTLY_MINE(i, count, own) for (long i = after(me, share(me, own, 0) - 1, own, count); i < (count); i = after(me, i, own, count))

/* Do it in a team of so many threads, if it is worth their meeting: `me` is the member. */
#define TOGETHER(THREADS, WORTH, ...)                                                                                    \
    do {                                                                                                                 \
        team all_of_us = {0};                                                                                            \
        int wanted = THREADS, worth = WORTH;                                                                             \
        _Pragma("omp parallel num_threads(wanted) if (worth)")                                                           \
        {                                                                                                                \
            const member myself = {&all_of_us, omp_get_thread_num(), omp_get_num_threads()}, *me = &myself;              \
            __VA_ARGS__;                                                                                                 \
        }                                                                                                                \
    } while (0)
