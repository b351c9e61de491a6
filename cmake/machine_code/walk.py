"""The cheapest walk through a kernel that does a given work."""

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from itertools import count
from operator import ge

from machine_code.control_flow import EXIT, Block, Loop, find_blocks, find_loops
from machine_code.listing import Instruction

Work = tuple[tuple[str, int], ...]  # patterns of opcodes, and how many instructions at least
MOST_INSTRUCTIONS = 30_000
MOST_STATES = 100_000  # of a search that finds nothing


@dataclass(frozen=True)
class Walk:
    """Instructions that a warp executes, and how often they do the work: in an unrolled loop more than once."""

    code: list[Instruction]
    rounds: int


def cheapest_walk(code: list[Instruction], work: Work, straight: bool) -> Walk | None:
    """Return the walk with the fewest instructions for each time that the work is done, or None if there is none.

    It goes once around a loop, or, if it is straight, from the kernel's begin to its end. It takes any side of a
    branch, so that it avoids the code of options that are off, and it repeats an inner loop as often as the work needs.
    The compiler may let an inner loop begin where the outer one does: if no walk passes that place once, it may pass it
    several times.
    """
    blocks = find_blocks(code)
    done = {address: work_of(block, work) for address, block in blocks.items()}
    if straight:
        whole = Loop(code[0].address, frozenset(blocks))
        return _walk(blocks, done, whole, EXIT, work, MOST_INSTRUCTIONS, once=True)
    return _around_a_loop(blocks, done, work, once=True) or _around_a_loop(blocks, done, work, once=False)


def _around_a_loop(blocks: dict[int, Block], done: dict[int, tuple[int, ...]], work: Work, once: bool) -> Walk | None:
    best: Walk | None = None
    found_in: list[frozenset[int]] = []
    loops = list(find_loops(blocks))
    for loop in loops:
        if not all(_can_do(i, number, loop, loops, done, once) for i, (_, number) in enumerate(work)):
            continue
        if any(body < loop.body for body in found_in):
            continue  # an outer loop, whose walk would go through the inner one
        totals = [sum(done[address][i] for address in loop.body) for i in range(len(work))]
        unrolled = max(min(total // number for total, (_, number) in zip(totals, work, strict=True)), 1)
        most = MOST_INSTRUCTIONS if best is None else int(len(best.code) / best.rounds * unrolled)
        found = _walk(blocks, done, loop, loop.head, work, most, once)
        if found:
            found_in.append(loop.body)
        if found and (best is None or len(found.code) / found.rounds < len(best.code) / best.rounds):
            best = found
    return best


def _can_do(
    kind: int, number: int, loop: Loop, loops: list[Loop], done: dict[int, tuple[int, ...]], once: bool
) -> bool:
    """Whether a loop has so many instructions of a kind, or some in an inner loop, which may be repeated."""
    here = [address for address in loop.body if done[address][kind]]
    if not here or sum(done[address][kind] for address in here) >= number:
        return bool(here)
    return not once or any(inner.body < loop.body and not inner.body.isdisjoint(here) for inner in loops)


def work_of(block: Block, work: Work) -> tuple[int, ...]:
    """Count the block's instructions of each kind. Products under a predicate belong to an option, and do not count."""
    opcodes = Counter(i.opcode for i in block.code if not (i.predicate and "MMA" in i.opcode))
    return tuple(sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode)) for pattern, _ in work)


def _walk(
    blocks: dict[int, Block],
    done: dict[int, tuple[int, ...]],
    loop: Loop,
    goal: int,
    work: Work,
    most: int,
    once: bool,
) -> Walk | None:
    """Dijkstra's algorithm over pairs of a block and the work done before it.

    A pair is dropped if the block was reached before, at no higher cost, with at least as much of all work done; if
    work is left that no later block does; or if even the block that does it with the fewest instructions would need too
    many for the rest.
    """
    needed = tuple(number for _, number in work)
    start = (loop.head, (0,) * len(work))
    costs, origins = {start: 0}, {}
    prices = [
        min((len(blocks[address].code) / done[address][i] for address in loop.body if done[address][i]), default=0.0)
        for i in range(len(work))
    ]
    possible = _possible_work(blocks, done, loop, once)
    reached: dict[int, list[tuple[int, ...]]] = {}
    order, searched = count(), count()
    queue = [(0, next(order), start)]
    end = None
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state[0] is None:
            end = state
            break
        if next(searched) > MOST_STATES:
            break
        if cost > costs[state]:
            continue
        address, before = state
        if any(b < n and not later for b, n, later in zip(before, needed, possible[address], strict=True)):
            continue
        if any(cost + (n - b) * price > most for b, n, price in zip(before, needed, prices, strict=True)):
            continue
        earlier = reached.setdefault(address, [])
        if any(all(map(ge, other, before)) for other in earlier):
            continue
        earlier.append(before)
        block = blocks[address]
        after = tuple(map(min, needed, map(sum, zip(before, done[address], strict=True))))
        cost += len(block.code)
        if cost > most:
            continue
        for successor in block.successors:
            if successor == goal and after == needed:
                following = (None, after)
            elif successor in loop.body and not (once and successor == loop.head):
                following = (successor, after)
            else:
                continue
            if cost < costs.get(following, most + 1):
                costs[following], origins[following] = cost, state
                heapq.heappush(queue, (cost, next(order), following))
    if end is None:
        return None
    path = []
    state = end
    while state in origins:
        state = origins[state]
        path.append(state[0])
    path.reverse()
    totals = [sum(done[address][i] for address in path) for i in range(len(work))]
    rounds = min((total // number for total, number in zip(totals, needed, strict=True)), default=1)
    return Walk([i for address in path for i in blocks[address].code], rounds)


def _possible_work(
    blocks: dict[int, Block], done: dict[int, tuple[int, ...]], loop: Loop, once: bool
) -> dict[int, tuple[bool, ...]]:
    """Return, for each block of a loop, which kinds of work it or a block after it does in this round."""
    possible = {address: tuple(map(bool, done[address])) for address in loop.body}
    changed = True
    while changed:
        changed = False
        for address in sorted(loop.body, reverse=True):
            following = blocks[address].successors & loop.body - ({loop.head} if once else set())
            kinds = tuple(map(any, zip(possible[address], *(possible[other] for other in following), strict=True)))
            if kinds != possible[address]:
                possible[address], changed = kinds, True
    return possible
