"""One simulated engine: the real scheduler and block manager, and a worker that only takes time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import make_block_manager
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.scheduler import LOOKAHEAD, Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.stats import StepWork
from fastinfer.errors import RequestError
from fastinfer.sampling_params import DEFAULT_PARAMS
from fastinfer.simulation.cost_file import CostFile
from fastinfer.simulation.trace import TraceRequest

OUTPUT_TOKEN = 0


@dataclass(slots=True)
class Record:
    """Times and counts of a simulated request.

    Attributes:
        request: the request.
        replica: number of the replica that computed it.
        load: load that it is for the router.
        first_scheduled_s: time of the first step that computed some of it, in seconds after the start; -1 before.
        first_token_s: time of its first token; -1 before.
        end_s: time of its last token; -1 before.
    """

    request: TraceRequest
    replica: int
    load: float = 1.0
    first_scheduled_s: float = -1.0
    first_token_s: float = -1.0
    end_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token in seconds, the time in the queue included."""
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token in seconds after the first; ``None`` if there is one token alone."""
        if self.request.output_tokens == 1:
            return None
        return (self.end_s - self.first_token_s) / (self.request.output_tokens - 1)


class Replica:
    """Simulates one engine.

    A step begins with :meth:`begin_step` and ends with :meth:`end_step`, which is called when the clock shows its end.

    Args:
        costs: limits of the engine and time of its steps.
        clock: function that returns the simulated time in seconds.

    Raises:
        RequestError: the KV cache does not hold one sequence of the maximum length.

    Attributes:
        scheduler: the scheduler.
        block_manager: the manager of the blocks of a KV cache that does not exist.
        is_busy: whether a step is being computed.
        num_steps: number of steps.
        busy_s: seconds in which steps were computed.
        num_prompt_tokens, num_generated_tokens: tokens that were computed of prompts, and that were generated.
    """

    def __init__(self, costs: CostFile, clock: Callable[[], float]) -> None:
        limits = costs.limits
        config = EngineConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        size = KVCacheSize(limits.windows, limits.num_blocks, limits.max_model_len, num_bytes=0)
        self.block_manager = make_block_manager(config, size, None, separates_roles=False)
        _check_cache(self.block_manager, limits.max_model_len)
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            separates_roles=limits.separates_roles,
            clock=clock,
        )
        self._cost, self._clock = costs.cost, clock
        # Requests whose tokens the scheduler need not see yet, so that a long queue takes little memory.
        self._queue: deque[tuple[Record, int, list[int]]] = deque()
        self._chunks: list[Chunk] = []
        self._records: dict[Sequence, Record] = {}
        self.is_busy = False
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def add(self, record: Record, number: int, prefix: list[int]) -> None:
        """Queue a request.

        Args:
            record: the record to fill in.
            number: number of the request, which no other one has.
            prefix: tokens of the shared prefix, or more of them.
        """
        self._queue.append((record, number, prefix))

    def _add_next(self) -> None:
        """Give the scheduler the request that has waited for longest."""
        record, number, prefix = self._queue.popleft()
        request = record.request
        # As all tokens but the first one of the request's own are one object, a prompt takes 8 bytes per token.
        own = [_own_token(number)] + [OUTPUT_TOKEN] * request.prompt_tokens
        tokens = (prefix[: request.prefix_tokens] + own)[: request.prompt_tokens]
        length = request.prompt_tokens + request.output_tokens
        sequence = Sequence(str(number), tokens, DEFAULT_PARAMS, 0, max_length=length)
        sequence.arrival_time = request.arrival_s
        self._records[sequence] = record
        self.scheduler.add(sequence)

    def begin_step(self) -> float | None:
        """Begin a step, and return how many seconds it takes; ``None`` if there is nothing to compute."""
        while self._queue and len(self.scheduler.waiting) < LOOKAHEAD:
            self._add_next()
        self._chunks = self.scheduler.schedule()
        if not self._chunks:
            return None
        work = StepWork.of(self._chunks)
        seconds = self._cost.seconds(work)
        self.is_busy = True
        self.num_steps += 1
        self.busy_s += seconds
        self.num_prompt_tokens += work.num_prompt_tokens
        return seconds

    def end_step(self) -> list[Record]:
        """End the step: its sequences have their tokens. Return the records of requests that ended."""
        now, ended, manager = self._clock(), [], self.block_manager
        for chunk in self._chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            if not chunk.is_last:
                manager.end_step(sequence)
                continue
            is_first = len(sequence.token_ids) == sequence.num_prompt_tokens
            sequence.append(_own_token(int(sequence.request_id)) if is_first else OUTPUT_TOKEN)
            self.num_generated_tokens += 1
            manager.end_step(sequence)
            if is_first:
                self._records[sequence].first_token_s = now
            if len(sequence.token_ids) == sequence.max_length:
                self.scheduler.finish(sequence)
                ended.append(self._end(sequence, now))
        self._chunks = []
        self.is_busy = False
        return ended

    def _end(self, sequence: Sequence, now: float) -> Record:
        record = self._records.pop(sequence)
        assert sequence.first_scheduled_time is not None
        record.first_scheduled_s, record.end_s = sequence.first_scheduled_time, now
        return record


def _own_token(number: int) -> int:
    """Return the token that only one request has, the first one of its own in the prompt and in the output.

    Blocks are found by the hash of all tokens up to their end, so whatever follows this token is not shared.
    """
    return -1 - number


def _check_cache(manager: BlockManager, max_model_len: int) -> None:
    """Check that the longest sequence fits into the KV cache, as the scheduler requires."""
    needed = manager.blocks_of(max_model_len)
    found = [pool.num_blocks for pool in manager.pools]
    if any(number < least for number, least in zip(found, needed, strict=True)):
        raise RequestError(f"num_blocks must be at least {needed} for max_model_len={max_model_len}, got {found}")
