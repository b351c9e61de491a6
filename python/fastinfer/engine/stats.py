"""Statistics of an engine's load and of its steps."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastinfer.engine.chunk import Chunk


@dataclass(slots=True)
class StepWork:
    """Quantities of a step's work.

    Contexts count pairs of a token and a position that it attends to, as if no layer had an attention window.

    Attributes:
        num_seqs: sequences that are computed.
        num_tokens: tokens that are computed, drafts included.
        num_prompt_tokens: those of them that belong to prompts.
        num_decodes: sequences that compute one token.
        decode_context: pairs of these sequences: for each of them its length.
        prompt_context: pairs of the other sequences, which compute several tokens.
    """

    num_seqs: int
    num_tokens: int
    num_prompt_tokens: int
    num_decodes: int
    decode_context: int
    prompt_context: int

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "StepWork":
        """Count the work of a step that computes these chunks."""
        num_seqs = num_tokens = num_prompt_tokens = num_decodes = decode_context = prompt_context = 0
        for chunk in chunks:
            count, seen = chunk.num_tokens + len(chunk.drafts), chunk.num_seen
            num_seqs += 1
            num_tokens += count
            if chunk.is_prompt:
                num_prompt_tokens += min(chunk.sequence.num_prompt_tokens - chunk.start, chunk.num_tokens)
            if count == 1:
                num_decodes += 1
                decode_context += seen + 1
            else:
                prompt_context += count * seen + count * (count + 1) // 2
        return cls(num_seqs, num_tokens, num_prompt_tokens, num_decodes, decode_context, prompt_context)


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class StepStats:
    """Record of one step of the engine.

    Attributes:
        start_time: time at which the step began, in seconds of ``time.perf_counter``.
        seconds: time that the step took.
        work: what was computed.
        num_generated_tokens: tokens that texts and beams have got, those that a grammar has forced included.
    """

    start_time: float
    seconds: float
    work: StepWork
    num_generated_tokens: int

    @property
    def num_seqs(self) -> int:
        """Sequences that were computed."""
        return self.work.num_seqs

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed, drafts included."""
        return self.work.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that belong to prompts."""
        return self.work.num_prompt_tokens


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps, see :class:`EngineStats`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, step: StepStats) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_prompt_tokens += step.num_prompt_tokens
        self.num_generated_tokens += step.num_generated_tokens


@dataclass(frozen=True)
class EngineStats:
    """The load of an engine at one moment, and counters since its start, which include the draft model's steps.

    Attributes:
        num_running: running sequences.
        num_waiting: waiting sequences, and requests that wait for their grammar or LoRA adapter.
        num_waiting_tokens: tokens of these, prompts and what was generated before a preemption.
        num_free_blocks: blocks of the KV cache without content.
        num_cached_blocks: blocks that hold a prefix but belong to no sequence.
        num_used_blocks: blocks that belong to sequences or pinned prompts.
        num_preemptions: preemptions since the start.
        num_overtakings: sequences that were admitted before one that had no room.
        num_postponed_decodes: times that a decoding sequence got no token in a step, for lack of budget; if many,
            ``max_num_batched_tokens`` is too small for ``max_num_seqs``.
        num_cut_drafts: draft tokens that were wanted, and for which a step had no budget or no blocks.
        num_queued_forks: completions and beams that found no slot, and had to compute again what their parent had.
        num_queried_tokens: tokens of all sequences admitted since the start.
        num_hit_tokens: those of them that the prefix cache held.
        kv_fragmentation: share, from 0 to 1, of the slots in running sequences' blocks that hold no token.
        num_drafted_tokens: draft tokens since the start.
        num_accepted_tokens: draft tokens accepted since the start.
        num_eager_steps: steps since the start that ran operator by operator instead of replaying a recorded graph: all
            with ``enforce_eager``, otherwise those of sizes that are not recorded (yet).
        num_failed_graphs: sizes of steps that could not be recorded as a graph.
        num_failed_draws: draws since the start that failed: those of all rows of a step, which are then repeated row by
            row, and those of single rows.
        num_steps: steps since the start that computed something.
        num_waited_steps: those of them whose results the next step had to wait for although steps are launched ahead,
            see ``async_scheduling`` of :class:`fastinfer.engine.config.EngineConfig`; 0 if they are not.
        num_prompt_tokens: prompt tokens computed since the start, again after a preemption.
        num_generated_tokens: tokens generated since the start.
        num_repairs: errors since the start after which all running sequences were queued to be computed again.
        num_expired: requests since the start that missed a deadline.
        is_sleeping: whether the engine sleeps, see :meth:`fastinfer.engine.engine.Engine.sleep`.
        num_adapter_loads: LoRA adapters copied into a slot since the start; if many, ``max_loras`` is too small for the
            adapters in use.
        num_loaded_host_blocks, num_loaded_disk_blocks: blocks and snapshots of states since the start that were loaded
            from host memory and from disk instead of being computed.
        num_damaged_kv_files: files of the KV cache on disk since the start that were not what their name says.
        num_dropped_kv_blocks: blocks since the start that were not written to disk, because too many waited
            already or another process was making room in the folder.
        num_failed_kv_files: files since the start that could not be read or written.
        num_draft_rounds: times since the start that a sequence got draft tokens to be verified in one step.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_preemptions: int
    num_overtakings: int
    num_postponed_decodes: int
    num_cut_drafts: int
    num_queued_forks: int
    num_queried_tokens: int
    num_hit_tokens: int
    kv_fragmentation: float
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_eager_steps: int
    num_failed_graphs: int
    num_failed_draws: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_repairs: int
    num_expired: int
    is_sleeping: bool
    num_adapter_loads: int
    num_loaded_host_blocks: int = 0
    num_loaded_disk_blocks: int = 0
    num_damaged_kv_files: int = 0
    num_dropped_kv_blocks: int = 0
    num_failed_kv_files: int = 0
    num_draft_rounds: int = 0
    num_waited_steps: int = 0
