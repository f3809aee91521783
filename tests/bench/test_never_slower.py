"""`benchmarks/never_slower.py`: whose texts are compared, and that nobody finds another's work done."""

from __future__ import annotations

from benchmark_module import benchmark

from draftproof.bench.load import Answer, Job
from draftproof.bench.sweep import Arm
from draftproof.bench.workload import Item

never_slower = benchmark("never_slower")


class Client:
    """Answers at once, and notes who asked."""

    def __init__(self) -> None:
        self.asked: list[Job] = []
        self._waiting: list[Job] = []

    def start(self, job: Job) -> None:
        self.asked.append(job)
        self._waiting.append(job)

    def poll(self, wait_s: float) -> list[Answer]:
        done, self._waiting = self._waiting, []
        return [Answer(job, 0.0, 1.0, (), "a", (1,), 1) for job in done]


def test_no_arm_finds_the_prompts_of_another_in_the_cache() -> None:
    """Every drafter has arms of its own, each with an off over the same target; prompts are shared under an arm's name, load and repeat."""
    client = Client()
    arms = {drafter: [Arm("off", "none", "0", client), Arm(f"{drafter}@auto", drafter, "auto", client)] for drafter in ("ngram", "model")}
    cells = [never_slower.Cell(drafter, "code", load) for drafter in arms for load in (1, 2)]
    done = list(never_slower.measure(cells, arms, {"code": [Item("0", "code", ("x",)), Item("1", "code", ("y",))]}, 3, 60.0, 8, 0.0))
    assert len(done) == 12 and all(set(pair) == {"off", "auto"} for cell in cells for pair in cell.pairs)
    shared = {(job.arm, job.load.name, job.repeat) for job in client.asked}
    assert len(client.asked) == 2 * 3 * 2 * (1 + 2) and len(shared) == 2 * 2 * 2 * 3, "drafters, arms, loads and pairs"
