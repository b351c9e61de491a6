"""The input tensors of a step."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.image_inputs import place_images
from fastinfer.engine.last_rows import LastRowsInputs
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.recorded_draws import RecordedDraws
from fastinfer.engine.sampling_inputs import SamplingInputs, SamplingRows
from fastinfer.engine.transfer import write_list
from fastinfer.models.batch import Batch, FeatureSlots
from fastinfer.models.image_tokens import ImageTokens
from fastinfer.models.sparse_attention import DENSE_PAGES, SparseRows
from fastinfer.ops.prompt import NO_ROW

# Number of ranges of the block tables that a message to other ranks names; of more they copy everything.
MAX_CHANGES = 1024
# Number of wanted rows of a batch whose rows all go through all layers.
ALL_ROWS = -1


class BatchSize(NamedTuple):
    """Sizes of a batch; recorded graphs are looked up by them.

    Attributes:
        num_seqs: number of sequences.
        num_tokens: number of tokens, drafts included.
        num_logits: number of rows of logits.
        has_adapters: whether any token has a LoRA adapter.
        first_prompt_row: index of the first token from which on all are tokens of prompts, if kernels compute these
            differently, see :mod:`fastinfer.engine.roles`; ``NO_ROW`` otherwise, and if there are none.
        num_wanted: number of rows that go through the layers that store nothing, see
            :class:`fastinfer.models.batch.LastRows`; ``ALL_ROWS`` if all do.
        first_wanted_prompt_row: as ``first_prompt_row``, among these rows.
        first_layer: first layer of a draft head that is computed, see :class:`fastinfer.models.batch.FeatureSlots`.
        num_tiles: number of rows that choose what they attend to, if there are tiles of prompts among them, see
            :class:`fastinfer.models.sparse_attention.SparseRows`; 0 otherwise.
    """

    num_seqs: int
    num_tokens: int
    num_logits: int
    has_adapters: bool
    first_prompt_row: int = NO_ROW
    num_wanted: int = ALL_ROWS
    first_wanted_prompt_row: int = NO_ROW
    first_layer: int = 0
    num_tiles: int = 0

    @property
    def num_hidden(self) -> int:
        """Number of rows of hidden states."""
        return self.num_tokens if self.num_wanted == ALL_ROWS else self.num_wanted


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of the model, valid until the next step.

    Attributes:
        hidden: [n, hidden] output of the last layer, before the last norm, of all tokens or of those that are wanted.
        logits: [n, vocab], with ``num_rows`` rows for each chunk in turn.
        sampling: sampling parameters of the rows.
        draws: recorded draws from the logits, if they are fp32 and the step was recorded on a CPU.
        tokens: [n] int64, tokens that the step's graph has drawn by the sampling parameters alone; ``None`` if it draws
            none.
    """

    hidden: Tensor
    logits: Tensor
    sampling: SamplingInputs | SamplingRows
    draws: RecordedDraws | None = None
    tokens: Tensor | None = None


class BatchInputs:
    """Input tensors of all steps, at addresses that never change, so that recorded graphs can read them.

    The host writes them; for a GPU, :meth:`upload` copies them to the device in one transfer, and the entries of the
    block tables that have changed, if any, in a second one.

    Args:
        max_seqs: maximum number of sequences in a batch.
        max_tokens: maximum number of tokens in a batch.
        max_logits: maximum number of rows of logits in a batch.
        max_blocks: maximum number of blocks of one sequence.
        num_groups: number of groups of layers, each of which has its own blocks.
        block_size: tokens per block of the cache.
        device: device that computes, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        has_states: whether the model has layers with linear attention, whose states are in slots.
        sparse_attention: share of their attention that the pages have which tokens attend to in layers with sparse
            attention; ``None`` if all attend to everything.
        sparse_prompts: whether these are tokens of prompts, too.
        drops_rows: whether the model's last layers store nothing, so that they are computed for wanted rows alone.
        head_layers: number of layers of a draft head, which reads and writes features; 0 for other models.
        has_window_lens: whether layers with a window see less of a sequence than others, see
            :class:`fastinfer.models.config.BlockConfig`.
        has_block_places: whether the model reads the places of tokens in their blocks.
        allocate: function that allocates the host's memory, [n] uint8; by default zeros of this process.

    Attributes:
        max_seqs, max_tokens, sparse_attention, head_layers: see above.
        device: device that computes.
        sampling: sampling parameters of the rows of logits.
        drawn: [max_logits] int64 on the device; the tokens of the last draw, if the graph of its step has drawn them or
            the batch needs them.
        drops_rows: see above.
        has_unknown_tokens: whether the batch has tokens that are still to be inserted by :meth:`insert_drawn`.
        images: the tokens of images in the batch, which recorded graphs do not read; ``None`` if there are none.
        hidden: [max_tokens, hidden] hidden states before the first layer, at an address that never changes, for a model
            without the first layer of the whole one; ``None`` otherwise.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        max_logits: int,
        max_blocks: int,
        block_size: int,
        num_groups: int = 1,
        device: str = "cpu",
        *,
        has_states: bool = False,
        sparse_attention: float | None = None,
        sparse_prompts: bool = False,
        drops_rows: bool = False,
        head_layers: int = 0,
        has_window_lens: bool = False,
        has_block_places: bool = False,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        self._block_size = block_size
        self._has_states = has_states
        self.head_layers = head_layers
        self._has_window_lens = has_window_lens
        self._has_block_places = has_block_places
        self.sparse_attention = sparse_attention
        self._sparse_prompts = sparse_prompts
        self._row_start = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self.drops_rows = drops_rows
        state_sizes = [max_seqs, max_tokens] if has_states else [0, 0]
        # The int64 arrays come first, for their alignment. The block tables come last: they are copied in parts.
        last_sizes = [2 * max_tokens, max_tokens + max_seqs + 1] if drops_rows else [0, 0]
        feature_size = 2 * max_tokens if head_layers else 0
        dense_size = 0 if sparse_attention is None else max_seqs  # of prompts, beside tokens with sparse attention
        tile_size = max_tokens + 1 if self._sparse_prompts else 0
        window_size = max_seqs if has_window_lens else 0
        place_size = max_tokens if has_block_places else 0
        longs = (2 + num_groups) * max_tokens + 3 * max_logits + last_sizes[0] + feature_size
        sizes = [*state_sizes, last_sizes[1], dense_size, tile_size, window_size, place_size]
        ints = max_tokens + 5 * max_logits + 2 * max_seqs + 1 + sum(sizes)
        self._table_start = 8 * longs + 4 * ints
        num_bytes = self._table_start + 4 * max_seqs * num_groups * max_blocks
        self._host = np.zeros(num_bytes, np.uint8) if allocate is None else allocate(num_bytes)
        wide = self._host[: 8 * longs].view(np.int64)
        narrow = self._host[8 * longs : self._table_start].view(np.int32)
        ends = np.cumsum([*[max_tokens] * (2 + num_groups), max_logits, 2 * max_logits, last_sizes[0]])
        self._token_ids, self._positions, *slots, self._logits_indices, longs_of_rows, last_longs, places = np.split(
            wide, ends
        )
        self._slot_mappings, self._feature_slots = slots, places.reshape(2, -1)
        ends = np.cumsum([*sizes, max_tokens, max_logits, 4 * max_logits, max_seqs])
        parts = np.split(narrow, ends)
        self._state_reads, self._state_writes, last_ints, self._dense_lens, self._tile_start, *others = parts
        self._window_lens, self._block_places, *others = others
        self._adapter_ids, self._logits_adapter_ids, words_of_rows, self._seq_lens, self._query_start = others
        self._last_rows = LastRowsInputs(last_longs.reshape(2, -1), last_ints, self._view) if drops_rows else None
        self.sampling = SamplingInputs(longs_of_rows.reshape(2, -1), words_of_rows.reshape(4, -1), self._view)
        self._token_ids_view, self._positions_view = self._token_ids.data, self._positions.data
        self._slot_views = [slot_mapping.data for slot_mapping in self._slot_mappings]
        self._adapter_ids_view, self._ends_view = self._adapter_ids.data, self._query_start[1:].data
        self._seq_lens_view, self._logits_indices_view = self._seq_lens.data, self._logits_indices.data
        self._logits_adapter_ids_view = self._logits_adapter_ids.data
        self._block_tables = self._host[self._table_start :].view(np.int32).reshape(num_groups, max_seqs, max_blocks)
        host = torch.from_numpy(self._host)
        self._memory = host if self.device.type == "cpu" else host.to(self.device)
        self.drawn = torch.zeros(max_logits, dtype=torch.int64, device=self.device)
        self._last_drawn: Tensor | None = None
        self.has_unknown_tokens = False
        self.images: ImageTokens | None = None
        self.hidden: Tensor | None = None
        # For each group and row: the list of blocks that was written last, and how many of its entries.
        self._written: list[list[tuple[list[int], int]]] = [[([], 0)] * max_seqs for _ in range(num_groups)]
        # Entries of the block tables that were written since the last upload, as ranges over all tables.
        self._changed: list[range] = []

    def fill(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> BatchSize:
        """Write the inputs of a step: sequence i is that of ``chunks[i]``, whose blocks are allocated already.

        Args:
            chunks: the step's chunks.
            rows: their rows of logits.
            drawn: [rows] int64 tokens of the last draw, on the device; needed if the host does not know all tokens yet.

        Returns:
            The sizes of the batch.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        adapters: list[int] = []
        seq_lens: list[int] = []
        ends: list[int] = []
        logits: list[int] = []
        logits_adapters: list[int] = []
        for chunk in chunks:
            sequence, position, drafts = chunk.sequence, chunk.start, chunk.drafts
            start = len(token_ids)
            if chunk.num_tokens == 1 and not drafts:
                known = sequence.token_ids
                token_ids.append(-1 - sequence.drawn_row if sequence.num_unknown_tokens else known[position])
                positions.append(position)
                adapters.append(sequence.adapter)
            else:
                token_ids += sequence.token_ids[position : position + chunk.num_tokens] + drafts
                positions += range(position, position + chunk.num_tokens + len(drafts))
                adapters += [sequence.adapter] * (chunk.num_tokens + len(drafts))
            end = len(token_ids)
            chunk.hidden_rows = slice(start, end)
            ends.append(end)
            seq_lens.append(chunk.num_seen + end - start)
            if chunk.num_receivers:
                first_draft = end - len(drafts)
                logits += [first_draft - 1] * chunk.num_receivers
                logits += range(first_draft, end)
                logits_adapters += [sequence.adapter] * chunk.num_rows
        write_list(self._token_ids_view, token_ids)
        write_list(self._positions_view, positions)
        write_list(self._adapter_ids_view, adapters)
        write_list(self._ends_view, ends)
        write_list(self._seq_lens_view, seq_lens)
        write_list(self._logits_indices_view, logits)
        write_list(self._logits_adapter_ids_view, logits_adapters)
        if self._has_states:
            self._state_reads[: len(chunks)] = [chunk.state_read for chunk in chunks]
            self._state_writes[: len(token_ids)] = [slot for chunk in chunks for slot in chunk.state_writes]
        if self.sparse_attention is not None:
            lens = [length if c.is_prompt else 0 for c, length in zip(chunks, seq_lens, strict=True)]
            write_list(self._dense_lens.data, lens)
        num_tiles = self._place_tiles(chunks) if self._sparse_prompts else 0
        if self._has_window_lens:
            write_list(self._window_lens.data, [c.start + c.num_tokens + len(c.drafts) for c in chunks])
        if self._has_block_places:
            write_list(self._block_places.data, [chunk.place for chunk in chunks])
        first_layer = 0
        if self.head_layers:
            self._place_features(chunks)
            # All sequences have as many drafts, and each draft has a layer of its own as long as there is one.
            first_layer = min(len(rows[0].drafts) if rows else 0, self.head_layers - 1)
        size = self._block_size
        for group, slots in enumerate(self._slot_views):
            blocks = [chunk.sequence.block_tables[group].blocks for chunk in chunks]
            self._fill_block_table(group, [_seen_blocks(chunk, group) for chunk in chunks])
            if len(chunks) < len(positions):  # the blocks of each token
                lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
                blocks = [own for own, length in zip(blocks, lengths, strict=True) for _ in range(length)]
            places = zip(blocks, positions, strict=True)
            write_list(slots, [own[position // size] * size + position % size for own, position in places])
        for chunk, end in zip(chunks, ends, strict=True):
            if (layout := chunk.sequence.layout) is not None:
                count = chunk.num_tokens + len(chunk.drafts)
                self._positions[end - count : end] = layout.positions(chunk.start, chunk.start + count)
        self.images = None
        if any(chunk.sequence.images is not None for chunk in chunks):
            self.images = place_images(chunks, self._positions[: len(positions)], self.device)
        num_wanted = ALL_ROWS
        if self._last_rows is not None and self.images is None:
            arrays = self._positions, self._adapter_ids, self._logits_indices[: len(logits)]
            num_wanted = self._last_rows.fill(chunks, ends, *arrays)
            if num_wanted == len(token_ids):
                num_wanted = ALL_ROWS
        self.sampling.write(rows)
        self.has_unknown_tokens = min(token_ids) < 0
        self._last_drawn = drawn if self.has_unknown_tokens else None
        if self.has_unknown_tokens and self.device.type == "cpu":
            self._keep_drawn()
            self.insert_drawn(len(token_ids))
            self.has_unknown_tokens = False
        sizes = len(chunks), len(token_ids), len(logits), max(adapters) >= 0
        return BatchSize(*sizes, num_wanted=num_wanted, first_layer=first_layer, num_tiles=num_tiles)

    def pad(self, size: BatchSize, padded: BatchSize) -> None:
        """Pad the batch that was written last.

        Padding tokens are token 0, belong to no sequence, and have no slot and no adapter. Padding sequences have no
        queries, and padding rows of logits repeat the first row of hidden states.

        Args:
            size: sizes of the batch.
            padded: sizes after padding.
        """
        tokens = slice(size.num_tokens, padded.num_tokens)
        self._token_ids[tokens] = 0  # what an earlier step left may be no token
        for slot_mapping in self._slot_mappings:
            slot_mapping[tokens] = -1
        if self.head_layers:
            self._feature_slots[:, tokens] = [[0], [-1]]
        self._adapter_ids[tokens] = -1
        self._query_start[size.num_seqs + 1 : padded.num_seqs + 1] = size.num_tokens
        self._seq_lens[size.num_seqs : padded.num_seqs] = 0
        self._window_lens[size.num_seqs : padded.num_seqs] = 0
        self._block_places[tokens] = 0
        self._state_reads[size.num_seqs : padded.num_seqs] = -1
        self._state_writes[tokens] = -1
        rows = slice(size.num_logits, padded.num_logits)
        self._logits_indices[rows] = 0
        self._logits_adapter_ids[rows] = -1
        self.sampling.pad(rows)
        if self._last_rows is not None:
            self._last_rows.pad(slice(size.num_seqs, padded.num_seqs), slice(size.num_hidden, padded.num_hidden))

    def upload(self) -> None:
        """Queue a copy of the inputs to the GPU; does nothing on a CPU.

        Tokens that the host does not know are then to be inserted by :meth:`insert_drawn`.
        """
        if self.device.type == "cpu":
            return
        self._memory[: self._table_start].copy_(
            torch.from_numpy(self._host[: self._table_start]).pin_memory(), non_blocking=True
        )
        if self._changed:
            places = np.concatenate([np.arange(part.start, part.stop) for part in self._changed])
            packed = torch.from_numpy(np.stack([places, self._block_tables.reshape(-1)[places]])).pin_memory()
            index, blocks = packed.to(self._memory.device, non_blocking=True)
            self._memory[self._table_start :].view(torch.int32)[index] = blocks.int()
            self._changed.clear()  # last: after an error the next upload copies them
        self._keep_drawn()

    def take_changes(self) -> list[int]:
        """Return what the next upload would copy of the block tables, which :meth:`add_changes` gives back.

        Returns:
            The first and the last entry, plus one, of each range over all tables; empty on a CPU.
        """
        changed, self._changed = self._changed, []
        if len(changed) > MAX_CHANGES:
            changed = [range(self._block_tables.size)]
        return [bound for part in changed for bound in (part.start, part.stop)]

    def add_changes(self, bounds: Sequence[int]) -> None:
        """Let the next upload copy entries of the block tables, which another rank may have written."""
        self._changed += map(range, bounds[::2], bounds[1::2])

    def insert_drawn(self, num_tokens: int) -> None:
        """Replace the tokens that the host does not know, which are negative, by those that the last draw has drawn.

        Args:
            num_tokens: number of tokens of the batch, padding included.
        """
        token_ids = self._view(self._token_ids, num_tokens)
        # A row that could not be drawn has -1. Its request ends once the host knows; until then any token will do.
        known = self.drawn[(-1 - token_ids).clamp(min=0)].clamp(min=0)
        torch.where(token_ids < 0, known, token_ids, out=token_ids)

    def lengths(self, num_seqs: int) -> list[int]:
        """Return the numbers of tokens of the sequences of the batch that was written last, which the host knows."""
        lengths: list[int] = np.diff(self._query_start[: num_seqs + 1]).tolist()
        return lengths

    def batch(self, size: BatchSize) -> Batch:
        """Return a batch of this size as views of the input tensors, which later steps overwrite."""
        tensor, last = self._view, None
        if size.num_wanted != ALL_ROWS:
            assert self._last_rows is not None
            sizes = size.num_seqs, size.num_wanted, size.first_wanted_prompt_row
            last = self._last_rows.tensors(*sizes, has_adapters=size.has_adapters)
        features = None
        if self.head_layers:
            reads, writes = (tensor(slots, size.num_tokens) for slots in self._feature_slots)
            features = FeatureSlots(reads, writes, size.first_layer)
        return Batch(
            token_ids=tensor(self._token_ids, size.num_tokens),
            positions=tensor(self._positions, size.num_tokens),
            query_start=tensor(self._query_start, size.num_seqs + 1),
            seq_lens=tensor(self._seq_lens, size.num_seqs),
            block_tables=tuple(tensor(block_table, size.num_seqs) for block_table in self._block_tables),
            slot_mappings=tuple(tensor(slot_mapping, size.num_tokens) for slot_mapping in self._slot_mappings),
            logits_indices=tensor(self._logits_indices, size.num_logits),
            adapter_ids=tensor(self._adapter_ids, size.num_tokens) if size.has_adapters else None,
            logits_adapter_ids=tensor(self._logits_adapter_ids, size.num_logits) if size.has_adapters else None,
            state_reads=tensor(self._state_reads, size.num_seqs) if self._has_states else None,
            state_writes=tensor(self._state_writes, size.num_tokens) if self._has_states else None,
            images=self.images,
            sparse=self._sparse_rows(size),
            hidden=None if self.hidden is None else self.hidden[: size.num_tokens],
            last=last,
            features=features,
            window_lens=tensor(self._window_lens, size.num_seqs) if self._has_window_lens else None,
            block_places=tensor(self._block_places, size.num_tokens) if self._has_block_places else None,
            row_start=self._row_start[: size.num_tokens + 1],
        )

    def _place_features(self, chunks: list[Chunk]) -> None:
        """Write the slots of the features that a draft head reads, and of those that its last rows stand for."""
        size, row = self._block_size, 0
        reads, writes = self._feature_slots
        for chunk in chunks:
            [table] = chunk.sequence.block_tables
            first, end = chunk.start, chunk.start + chunk.num_tokens
            slots = [table.blocks[p // size] * size + p % size for p in range(max(first - 1, 0), end)]
            after = row + chunk.num_tokens
            reads[row:after] = slots[:-1] if first else [slots[0], *slots[:-1]]
            writes[row:after] = -1
            if chunk.num_receivers:
                writes[after - 1] = slots[-1]
            row = after

    def _place_tiles(self, chunks: list[Chunk]) -> int:
        """Write the first tokens of the rows that choose what they attend to, and return the number of rows.

        A tile of a prompt ends with its block, or beside an image, where a chunk may end. So tiles do not depend on the
        chunks. There are none without prompts: each token is then a row.
        """
        starts, tokens = [0], 0
        for chunk in chunks:
            end = tokens + chunk.num_tokens + len(chunk.drafts)
            if chunk.is_prompt:
                first, images = chunk.start, chunk.sequence.images
                borders = {tokens - first + start for start in (() if images is None else images.borders)}
                borders.update(range(tokens + self._block_size - first % self._block_size, end, self._block_size))
                starts += [*sorted(border for border in borders if tokens < border < end), end]
            else:
                starts += range(tokens + 1, end + 1)
            tokens = end
        write_list(self._tile_start.data, starts)
        return len(starts) - 1 if chunks[-1].is_prompt else 0

    def _sparse_rows(self, size: BatchSize) -> SparseRows | None:
        """Return the tokens of a batch that attend to a part of the cache, if there are any."""
        num_generated = min(size.first_prompt_row, size.num_tokens)
        has_prompts = num_generated < size.num_tokens
        if self.sparse_attention is None or not (num_generated or self._sparse_prompts):
            return None
        dense_lens = self._view(self._dense_lens, size.num_seqs) if has_prompts else None
        tile_start = self._view(self._tile_start, size.num_tiles + 1) if size.num_tiles else None
        row_start = self._row_start[: num_generated + 1]
        return SparseRows(self.sparse_attention, DENSE_PAGES, num_generated, row_start, dense_lens, tile_start)

    def digest(self, size: BatchSize) -> int:
        """Return a checksum of the tokens of a batch and their places, by which processes can compare their inputs."""
        digest = zlib.crc32(repr(size).encode())
        used = [array[: size.num_tokens].data for array in (self._token_ids, self._positions, *self._slot_mappings)]
        used += [self._query_start[: size.num_seqs + 1].data, self._seq_lens[: size.num_seqs].data]
        used.append(self._logits_indices[: size.num_logits].data)
        if size.has_adapters:
            used += [self._adapter_ids[: size.num_tokens].data, self._logits_adapter_ids[: size.num_logits].data]
        if self._has_states:
            used += [self._state_reads[: size.num_seqs].data, self._state_writes[: size.num_tokens].data]
        if self.sparse_attention is not None:
            used.append(self._dense_lens[: size.num_seqs].data)
        if size.num_tiles:
            used.append(self._tile_start[: size.num_tiles + 1].data)
        for memory in used:
            digest = zlib.crc32(memory, digest)
        return digest

    def _view(self, array: np.ndarray, length: int) -> Tensor:
        """Return the first elements of an array of the inputs as a tensor on the device."""
        start = array.ctypes.data - self._host.ctypes.data
        values = self._memory[start : start + array[:length].nbytes].view(torch.from_numpy(array[:0]).dtype)
        return values.view(length, *array.shape[1:])

    def _keep_drawn(self) -> None:
        """Copy the tokens of the last draw to where they are inserted from, unless a graph has drawn them there."""
        last, self._last_drawn = self._last_drawn, None
        if last is not None and last.data_ptr() != self.drawn.data_ptr():
            self.drawn[: len(last)].copy_(last)

    def _fill_block_table(self, group: int, rows: list[list[int]]) -> None:
        """Write the new entries of a group's block table.

        A sequence's list of blocks either grows at its end or is replaced by another list.
        """
        written = self._written[group]
        for row, blocks in enumerate(rows):
            known, count = written[row]
            if known is not blocks:
                count = 0
            if count < len(blocks):
                self._block_tables[group, row, count : len(blocks)] = blocks[count:]
                written[row] = blocks, len(blocks)
                if self.device.type != "cpu":
                    _, max_seqs, max_blocks = self._block_tables.shape
                    start = (group * max_seqs + row) * max_blocks
                    self._changed.append(range(start + count, start + len(blocks)))


def _seen_blocks(chunk: Chunk, group: int) -> list[int]:
    """Return the blocks of a group of layers that the tokens of a chunk see."""
    table, layout = chunk.sequence.block_tables[group], chunk.sequence.layout
    return table.blocks if layout is None else table.seen_in(layout.span(chunk.start))
