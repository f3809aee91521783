"""The loop that keeps a load up: how many requests run at a time, and what takes the places at the end of a steady one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftproof.bench.load import Answer, Job, Load, play
from draftproof.bench.workload import Item


class Paced:
    """Answers a job after as many polls as it asks for tokens; remembers how many ran beside each, and how many started under a name."""

    def __init__(self) -> None:
        self.running: list[tuple[Job, int]] = []
        self.beside: dict[tuple[int, int], set[int]] = {}
        self.started: list[Job] = []

    def start(self, job: Job) -> None:
        self.running.append((job, job.max_tokens))
        self.started.append(job)

    def poll(self, wait_s: float) -> list[Answer]:
        for job, _ in self.running:
            self.beside.setdefault((job.repeat, job.number), set()).add(len(self.running))
        self.running = [(job, left - 1) for job, left in self.running]
        ended = [job for job, left in self.running if not left]
        self.running = [(job, left) for job, left in self.running if left]
        return [Answer(job, 0.0, 1.0, text="an answer") for job in ended]


def jobs(lengths: Sequence[int], load: Load, turns: int = 1) -> list[Job]:
    return [Job("off", load, 3, n, Item(str(n), "class", ("said",) * turns), n, length, 0.0) for n, length in enumerate(lengths)]


def test_a_closed_loop_drains() -> None:
    client, load = Paced(), Load(3)
    found = list(play(client, jobs([2, 9, 4, 5, 3], load), load))
    assert sorted(a.job.number for a in found) == [0, 1, 2, 3, 4] and len(client.started) == 5
    assert client.beside[3, 3] >= {1} or client.beside[3, 1] >= {1}, "the last one runs alone"


def test_every_request_that_counts_meets_the_whole_steady_load() -> None:
    for count in (1, 2, 3, 5):                  # fewer jobs than places, too
        client, load = Paced(), Load(3, steady=True)
        found = list(play(client, jobs([4, 18, 8, 10, 6][:count], load), load))
        assert sorted(a.job.number for a in found) == list(range(count)) and all(a.job.repeat == 3 for a in found)
        assert all(client.beside[3, n] == {3} for n in range(count)), client.beside
        assert not client.running, "what filled the places has ended, too"
        others = [job.repeat for job in client.started if job.repeat != 3]
        assert all(repeat < -1 for repeat in others) and len(set(others)) == len(others)
        assert len({job.max_tokens for job in client.started[:3]}) == 3, "they are at different places of their answers"


def test_what_fills_a_steady_load_is_new_in_every_block() -> None:
    """A prompt that an earlier block had read would cost nothing to read again."""
    filled = []
    for block in (1, 2):
        client, load = Paced(), Load(3, steady=True)
        list(play(client, [replace(job, block=block) for job in jobs([4, 8], load)], load))
        filled.append({job.repeat for job in client.started if job.repeat != 3})
    assert all(filled) and not filled[0] & filled[1]


def test_a_conversation_keeps_its_place_in_a_steady_load() -> None:
    client, load = Paced(), Load(2, steady=True)
    found = list(play(client, jobs([4, 1], load, turns=3), load))
    assert sorted((a.job.number, a.job.turn) for a in found) == [(n, t) for n in range(2) for t in range(3)]
    assert client.beside[3, 0] == client.beside[3, 1] == {2}
