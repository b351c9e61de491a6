"""Which replica gets which request: prefixes are found again, and no replica is left out or overrun."""

import contextlib
import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest

from fastinfer.client.endpoint import Endpoint
from fastinfer.server.router.http_replica import HttpReplica
from fastinfer.server.router.policy import choose
from fastinfer.server.router.prefix_index import PrefixIndex
from fastinfer.server.router.prompts import BLOCK_BYTES, Prompt, find_prompt, parse_object

NUM_PREFIXES = 8
PREFIX = 1600  # characters
QUESTION = 200


def replicas(count: int, max_blocks: int = 1 << 16) -> list[HttpReplica]:
    return [HttpReplica(Endpoint.parse(f"http://127.0.0.1:{1 + i}"), max_blocks) for i in range(count)]


def prompt(text: str, **fields: object) -> Prompt:
    return find_prompt({"prompt": text, **fields}, b"")


class Simulation:
    """Requests that begin with one of eight texts, and replicas that keep the last few of these.

    Attributes:
        num_sent: number of requests per replica.
        num_hits: requests whose text the replica had.
    """

    def __init__(self, count: int, num_kept: int, beta: float = 1.0, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._texts = [self._text(PREFIX) for _ in range(NUM_PREFIXES)]
        self._beta = beta
        self._num_kept = num_kept
        self.replicas = replicas(count)
        self._kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.replicas]
        self.num_sent = [0] * count
        self.num_hits = 0

    def _text(self, length: int) -> str:
        return "".join(self._random.choices("abcdefgh ", k=length))

    def run(self, num_requests: int, concurrency: int, weights: Sequence[float] = (1,) * NUM_PREFIXES) -> None:
        """Send requests, as many at once as given; each takes some time."""
        ends: list[tuple[float, int, contextlib.ExitStack]] = []
        now = 0.0
        for number in range(num_requests):
            if len(ends) == concurrency:
                now, _, stack = heapq.heappop(ends)
                stack.close()
            text = self._random.choices(range(NUM_PREFIXES), weights)[0]
            request = prompt(self._texts[text] + self._text(QUESTION))
            replica = choose(self.replicas, request, self._beta)
            assert replica is not None
            stack = contextlib.ExitStack()
            stack.enter_context(replica.running(request))
            index = self.replicas.index(replica)
            self.num_sent[index] += 1
            self.num_hits += text in self._kept[index]
            self._kept[index][text] = None
            self._kept[index].move_to_end(text)
            if len(self._kept[index]) > self._num_kept:
                self._kept[index].popitem(last=False)
            heapq.heappush(ends, (now + self._random.expovariate(1.0), number, stack))
        for _, _, stack in ends:
            stack.close()

    @property
    def hit_rate(self) -> float:
        """Hits as a part of what they could be: each text must be computed once."""
        return self.num_hits / (sum(self.num_sent) - NUM_PREFIXES)

    @property
    def skew(self) -> float:
        return max(self.num_sent) * len(self.num_sent) / sum(self.num_sent)


EVEN = (1.0,) * NUM_PREFIXES
ZIPF = tuple(1 / (1 + rank) for rank in range(NUM_PREFIXES))


@pytest.mark.parametrize("weights", [EVEN, ZIPF])
@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_prefixes_are_found_again(count: int, concurrency: int, weights: Sequence[float]) -> None:
    simulation = Simulation(count, num_kept=NUM_PREFIXES, seed=count)
    simulation.run(1000, concurrency, weights)
    assert simulation.hit_rate >= 0.9
    if concurrency > 1:  # one request after the other may well go where its text is
        assert simulation.skew <= 1.5


@pytest.mark.parametrize("concurrency", [16, 32])
def test_replicas_that_keep_few_prefixes(concurrency: int) -> None:
    simulation = Simulation(4, num_kept=3, beta=0.5)
    simulation.run(1000, concurrency)
    assert simulation.hit_rate >= 0.9
    assert simulation.skew <= 1.5


def test_new_prompts_go_round_while_nothing_runs() -> None:
    simulation = Simulation(4, num_kept=NUM_PREFIXES)
    chosen = Counter[str]()
    for number in range(40):
        replica = choose(simulation.replicas, prompt(f"{number} " * 500), 1.0)
        assert replica is not None
        chosen[replica.name] += 1
        with replica.running(prompt(f"{number} " * 500)):
            pass
    assert set(chosen.values()) == {10}


def test_a_conversation_stays_where_it_is_while_nothing_else_runs() -> None:
    """However many of the last requests have gone there."""
    simulation = Simulation(8, num_kept=NUM_PREFIXES)
    text, chosen = "", set[str]()
    for number in range(50):
        text += f"{number} " * 300
        replica = choose(simulation.replicas, prompt(text), 1.0)
        assert replica is not None
        chosen.add(replica.name)
        with replica.running(prompt(text)):
            pass
    assert len(chosen) == 1


def test_an_overloaded_replica_changes_nothing_between_the_others() -> None:
    hot, *others = replicas(4)
    hot.load = 1000.0
    texts = [prompt(f"{number} " * 500) for number in range(3)]
    for replica, text in zip(others, texts, strict=True):
        replica.prefixes.add(text)
        hot.prefixes.add(text)
    for _ in range(3):
        assert [choose([hot, *others], text, 1.0) for text in texts] == others


def test_what_a_replica_remembers_is_not_its_load() -> None:
    """The one with the fewest prefixes may be the one that has no time to compute any."""
    busy, idle = replicas(2)
    for number in range(100):
        idle.prefixes.add(prompt(f"{number} " * 500))
    with busy.running(prompt("x" * 1000)):
        assert choose([busy, idle], prompt("y" * 1000), 1.0) is idle


def test_load_counts_what_is_to_be_computed() -> None:
    (replica,) = replicas(1)
    long = prompt("x" * 8192)
    with replica.running(long) as matched:
        assert matched == 0
        assert replica.load == 1 + long.num_bytes / 4096
        with replica.running(long) as matched:
            assert matched == 8192
            assert 2 <= replica.load - long.num_bytes / 4096 < 2.1
    assert (replica.load, replica.num_running) == (0, 0)


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose([], prompt("x"), 1.0) is None


def test_the_index_forgets_the_ends_of_old_prompts_first() -> None:
    index = PrefixIndex(max_blocks=10)
    first, second = prompt("a" * BLOCK_BYTES * 8), prompt("b" * BLOCK_BYTES * 6)
    index.add(first)
    index.add(second)
    assert len(index) == 10
    assert index.matched(second) == 6 * BLOCK_BYTES
    assert index.matched(first) == 4 * BLOCK_BYTES
    index.add(prompt("c" * BLOCK_BYTES * 1000))
    assert len(index) == 10
    assert index.matched(second) == 0


def test_prompts_of_all_interfaces() -> None:
    def matched(first: dict[str, object], second: dict[str, object], scopes: tuple[bytes, bytes] = (b"", b"")) -> int:
        index = PrefixIndex(100)
        index.add(find_prompt(first, scopes[0]))
        return index.matched(find_prompt(second, scopes[1])) // BLOCK_BYTES

    turn = {"role": "user", "content": "x" * 1000}
    chat = {"messages": [turn]}
    longer = {"messages": [turn, {"role": "assistant", "content": "y" * 1000}], "temperature": 0}
    assert matched(chat, longer) == 8
    assert matched({"system": "s" * 500, **chat}, {"system": "s" * 500, **longer}) == 11
    assert matched({"instructions": "s" * 500, "input": "t"}, {"instructions": "s" * 500, "input": "u"}) == 3
    assert matched({"prompt": [7] * 300}, {"prompt": [7] * 400}) == 4
    for other in ({"model": "b"}, {"cache_salt": "b"}, {"tools": [{"type": "function"}]}):
        assert matched(chat, {**longer, **other}) == 0
    assert matched(chat, longer, (b"key", b"other key")) == 0
    assert find_prompt({"messages": None}, b"") == Prompt()
    assert find_prompt(parse_object(b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"), b"") == Prompt()


def test_very_long_prompts_are_told_apart_by_their_beginning() -> None:
    long = prompt("x" * (1 << 20))
    assert len(long.hashes) == 1024
    assert long.num_bytes > 1 << 20
