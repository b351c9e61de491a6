"""How long a request may wait, in steps: the bounds of the scheduler's docstring, on random traces without a model."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType

import pytest
from support.blocks import block_manager

from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.sampling_params import SamplingParams


@dataclass(eq=False)
class Job:
    """One request of a trace, and what became of it; steps are counted from 0."""

    name: str
    arrival: int
    num_prompt_tokens: int
    num_output_tokens: int = 1
    n: int = 1
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    first_token: int | None = None
    served: list[list[int]] = field(default_factory=list)

    @property
    def wait(self) -> int:
        """Number of steps from the arrival to the first token, the step of the first token included."""
        assert self.first_token is not None
        return self.first_token - self.arrival + 1

    @property
    def last_token(self) -> int:
        return max(steps[-1] for steps in self.served)

    @property
    def order(self) -> tuple[int, int]:
        return self.sequences[0].order


class Simulation:
    """Runs a scheduler on jobs as the engine would, with made-up tokens."""

    def __init__(self, max_num_seqs: int, budget: int, num_blocks: int = 100_000, prefix_caching: bool = False) -> None:
        manager = block_manager(num_blocks, 4, prefix_caching)
        self.scheduler = Scheduler(manager, max_num_seqs, budget)
        self.step_number = 0
        self.jobs: dict[str, Job] = {}
        self.num_in_step: list[int] = []

    def add(self, job: Job) -> Job:
        # No two prompts begin with the same tokens, so that nothing is found in the prefix cache but one's own blocks.
        prompt = [len(self.jobs)] * job.num_prompt_tokens
        options = {"priority": job.priority, "max_length": job.num_prompt_tokens + job.num_output_tokens}
        job.sequences = [Sequence(job.name, prompt, SamplingParams(), 0, **options) for _ in range(job.n)]
        job.sequences[0].siblings = job.sequences[1:]
        job.served = [[] for _ in job.sequences]
        self.jobs[job.name] = job
        self.scheduler.add(job.sequences[0])
        return job

    def step(self) -> dict[str, int]:
        """Run one step, and return how many tokens each job's sequences computed."""
        computed: dict[str, int] = {}
        chunks = self.scheduler.schedule()
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks), "a sequence is in a step only once"
        total = sum(chunk.num_tokens for chunk in chunks)
        assert total <= self.scheduler.max_num_batched_tokens
        assert all(chunk.num_tokens > 0 for chunk in chunks)
        for chunk in chunks:
            sequence, is_last = chunk.sequence, chunk.is_last
            assert sequence.state is SequenceState.RUNNING
            job = self.jobs[sequence.request_id]
            computed[job.name] = computed.get(job.name, 0) + chunk.num_tokens
            sequence.num_computed_tokens += chunk.num_tokens
            if is_last:
                siblings, sequence.siblings = sequence.siblings, []
                for sibling in siblings:
                    self.scheduler.fork(sequence, sibling)
                for each in (sequence, *siblings):
                    each.append(1)
                    job.served[job.sequences.index(each)].append(self.step_number)
                job.first_token = self.step_number if job.first_token is None else job.first_token
        for job in self.jobs.values():
            for sequence in job.sequences:
                if sequence.state is not SequenceState.FINISHED and len(sequence) >= sequence.max_length:
                    self.scheduler.finish(sequence)
        assert sum(sequence.num_slots for sequence in self.scheduler.running) <= self.scheduler.max_num_seqs
        self.num_in_step.append(len(self.scheduler.running) + len(chunks))
        self.step_number += 1
        return computed

    def run(self, jobs: list[Job]) -> None:
        """Run jobs, each from the step of its arrival, to the end; some token is computed in every step."""
        to_come = deque(jobs)
        while to_come or self.scheduler.running or self.scheduler.waiting:
            while to_come and to_come[0].arrival <= self.step_number:
                self.add(to_come.popleft())
            assert self.step() or not self.scheduler.running + self.scheduler.waiting, "an idle step"


def random_jobs(rng: random.Random, budget: int, *, longest: int, max_n: int = 1, priorities: int = 1) -> list[Job]:
    """Many short prompts, some long ones, in bursts."""
    jobs, arrival = [], 0
    for number in range(rng.randint(5, 40)):
        arrival += rng.choice([0, 0, 0, 1, 2, rng.randint(0, 3 * longest // budget + 1)])
        longest_now = longest if rng.random() < 0.3 else min(longest, 8)
        prompt, outputs = rng.randint(1, longest_now), rng.randint(1, rng.choice([2, 30]))
        n = rng.randint(1, max_n) if rng.random() < 0.3 else 1
        jobs.append(Job(f"job {number}", arrival, prompt, outputs, n, rng.randrange(priorities)))
    return jobs


def before(jobs: list[Job], job: Job) -> Iterator[Job]:
    """The other jobs whose prompts were not complete when the job arrived, and that arrived before its first token."""
    for other in jobs:
        assert job.first_token is not None
        assert other.first_token is not None
        if other is not job and other.first_token >= job.arrival and other.arrival <= job.first_token:
            yield other


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seed", range(40))
def test_the_wait_is_bounded_by_older_prompts_and_by_shorter_ones(seed: int, budget: int) -> None:
    """Where slots and blocks suffice. The second bound does not know how long the long prompts are."""
    jobs = random_jobs(random.Random(seed), budget, longest=20 * budget, priorities=1 + seed % 3)
    Simulation(max_num_seqs=1000, budget=budget).run(jobs)
    for job in jobs:
        own = job.num_prompt_tokens
        older = own + sum(other.num_prompt_tokens for other in before(jobs, job) if other.order < job.order)
        shorter = own
        for other in before(jobs, job):
            if other.priority == job.priority:
                shorter += min(other.num_prompt_tokens, own)
            elif other.priority < job.priority:
                shorter += other.num_prompt_tokens
        assert job.wait <= -(-(8 * min(older, shorter) + 7) // budget)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("seed", range(20))
def test_every_running_sequence_gets_its_turn(seed: int, budget: int) -> None:
    """However many more sequences than tokens of a step there are, and whatever prompts arrive."""
    jobs = random_jobs(random.Random(seed), budget, longest=20 * budget, max_n=5)
    simulation = Simulation(max_num_seqs=1000, budget=budget)
    simulation.run(jobs)
    for job in jobs:
        for steps in job.served:
            for previous, step in pairwise(steps):
                num_running = max(simulation.num_in_step[previous : step + 1])
                assert step - previous <= -(-(4 * num_running + 3) // (3 * budget))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_nobody_starves_for_slots_or_blocks(seed: int, prefix_caching: bool) -> None:
    """A request without room is overtaken by at most max_num_seqs others of its priority, and by nobody else."""
    rng = random.Random(seed)
    max_num_seqs, budget = rng.randint(1, 8), rng.choice([1, 4, 32])
    longest = rng.choice([20, 100])
    num_blocks = rng.choice([1, 2, 50]) * (-(-(longest + 30) // 4) + max_num_seqs)
    simulation = Simulation(max_num_seqs, budget, num_blocks, prefix_caching)
    jobs = random_jobs(rng, budget, longest=longest, max_n=max_num_seqs, priorities=2)
    simulation.run(jobs)
    assert simulation.scheduler.block_manager.num_used == 0
    for job in jobs:
        assert all(len(sequence) == sequence.max_length for sequence in job.sequences)
        assert all(sequence.num_overtakers <= max_num_seqs for sequence in job.sequences)


@pytest.mark.parametrize("seed", range(40))
def test_the_wait_for_slots_is_bounded_by_older_requests_and_few_younger_ones(seed: int) -> None:
    """With a budget for all prompts at once, so that only slots are short; requests come faster than they end."""
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 8)
    jobs = []
    for number in range(150):
        n = max_num_seqs if rng.random() < 0.1 else rng.randint(1, 1 + max_num_seqs // 4)
        jobs.append(Job(f"job {number}", number // 2, rng.randint(1, 8), rng.randint(1, 6), n))
    Simulation(max_num_seqs, budget=10_000).run(jobs)
    num_overtakers = []
    for index, job in enumerate(jobs):
        assert job.first_token is not None
        younger = [other for other in jobs[index + 1 :] if other.first_token < job.first_token]  # type: ignore[operator]
        older = [other for other in jobs[:index] if other.last_token >= job.arrival]
        assert len(younger) <= max_num_seqs
        assert job.wait <= 1 + sum(other.num_output_tokens for other in older + younger)
        num_overtakers.append(len(younger))
    assert max_num_seqs == 1 or max(num_overtakers) > 0


@pytest.mark.parametrize("max_num_seqs", [2, 4, 9])
def test_small_requests_overtake_one_that_needs_all_slots_but_not_for_ever(max_num_seqs: int) -> None:
    """Small ones arrive in every step, and end so soon that there is always a slot for the next one."""
    simulation = Simulation(max_num_seqs, budget=64)
    running = simulation.add(Job("running", 0, 5, 3 * max_num_seqs))
    simulation.step()
    large = simulation.add(Job("large", 1, 5, 4, n=max_num_seqs))
    small = []
    while large.first_token is None:
        small.append(simulation.add(Job(f"small {len(small)}", simulation.step_number, 3, 1)))
        simulation.step()
    assert running.first_token is not None
    assert large.first_token == running.first_token + running.num_output_tokens
    overtakers = [job for job in small if job.first_token is not None]
    assert overtakers == small[:max_num_seqs]
    assert all(job.wait == 1 for job in overtakers)
    assert simulation.scheduler.num_overtakings == large.sequences[0].num_overtakers == max_num_seqs


@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("budget", [2, 16, 64])
def test_a_short_request_behind_a_long_prompt_gets_its_token_at_once(budget: int, priority: int) -> None:
    simulation = Simulation(max_num_seqs=8, budget=budget)
    long = simulation.add(Job("long", 0, 23 * budget))
    assert simulation.step() == {"long": budget}, "alone it gets the whole step"
    short = simulation.add(Job("short", 1, budget // 2, priority=priority))
    assert simulation.step() == {"long": budget - budget // 2, "short": budget // 2}
    assert short.wait == 1
    while long.first_token is None:
        simulation.step()
    assert long.wait == 24


def test_a_prompt_that_is_nearly_done_counts_as_short() -> None:
    simulation = Simulation(max_num_seqs=8, budget=16)
    simulation.add(Job("long", 0, 44))
    simulation.step()
    simulation.step()
    simulation.add(Job("short", 2, 8))
    assert simulation.step() == {"long": 12, "short": 4}, "after its half there are 4 tokens left of the long prompt"


def test_a_more_urgent_prompt_gets_the_whole_step() -> None:
    simulation = Simulation(max_num_seqs=8, budget=16)
    simulation.add(Job("long", 0, 160))
    simulation.step()
    simulation.add(Job("urgent", 1, 40, priority=-1))
    assert [simulation.step() for _ in range(4)] == [
        {"urgent": 16},
        {"urgent": 16},
        {"urgent": 8, "long": 8},
        {"long": 16},
    ]


def test_a_prompt_without_room_takes_it_from_a_less_urgent_prompt() -> None:
    simulation = Simulation(max_num_seqs=8, budget=16, num_blocks=41)
    long = simulation.add(Job("long", 0, 160, priority=1))
    simulation.step()
    same = simulation.add(Job("same", 1, 40, priority=1))
    assert simulation.step() == {"long": 16}
    urgent = simulation.add(Job("urgent", 2, 8, 3))
    assert simulation.step() == {"urgent": 8, "same": 8}
    assert (urgent.wait, simulation.scheduler.num_preemptions) == (1, 1)
    while long.first_token is None:
        simulation.step()
    assert same.first_token is not None


@pytest.mark.parametrize("n", [1, 4])
def test_a_prompt_without_a_slot_takes_those_of_a_less_urgent_prompt(n: int) -> None:
    simulation = Simulation(max_num_seqs=4, budget=16)
    if n < 4:
        simulation.add(Job("decodes", 0, 4, 9, n=4 - n))
    simulation.step()
    simulation.add(Job("long", 1, 160, n=n, priority=1))
    simulation.step()
    simulation.add(Job("urgent", 2, 8, n=n))
    assert simulation.step()["urgent"] == 8


def count_calls(function: Callable[[], object]) -> int:
    """The number of calls of Python functions that a call makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return calls


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(1000, 4), (12, 64), (1000, 1000)])
def test_the_work_of_a_step_does_not_depend_on_the_length_of_the_queue(num_blocks: int, max_num_seqs: int) -> None:
    """Without slots, without blocks, and while a prompt takes all tokens."""
    counts = set()
    for num_waiting in (1000, 3000):
        simulation = Simulation(max_num_seqs, budget=8, num_blocks=num_blocks, prefix_caching=True)
        for number in range(num_waiting):
            simulation.add(Job(f"job {number}", 0, 30, 12))
        for _ in range(20):
            simulation.step()
        counts.add(count_calls(simulation.scheduler.schedule))
    assert len(counts) == 1


def test_equal_prompts_are_served_one_after_the_other() -> None:
    """So that a later one finds in the prefix cache what they have in common."""
    simulation = Simulation(max_num_seqs=8, budget=10)
    for name in "abc":
        simulation.add(Job(name, 0, 20))
    steps = [simulation.step() for _ in range(6)]
    assert steps == [{"a": 10}, {"a": 10}, {"b": 10}, {"b": 10}, {"c": 10}, {"c": 10}]
