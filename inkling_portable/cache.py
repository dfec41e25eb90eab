"""What a sequence leaves behind between steps: paged keys and values, rings of convolution inputs, and their reuse.

Three kinds of state exist. *Full* layers keep every key and value, *sliding* layers those of the last window (older
pages go back to the pool at once), and every short convolution keeps its last inputs in a ring of `R = W - 1` rows
plus room for drafts, the row of position `p` at `p % R`. Full and sliding layers have a block table each, shared by
all layers of the kind.

A prompt whose beginning was computed before starts behind it, if *every* kind of state at that point is still there:
all full pages, the sliding pages of the window before it, and a snapshot of the rings. Snapshots are taken where a
step crosses a page boundary and the ring still holds the rows before it. Multi-token-prediction depths are further
layers of the same caches; their snapshot also keeps the backbone's last hidden states, from which a depth's newest
entries are recomputed. Those entries depend on tokens behind the prefix, so the pages that hold them are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inkling_portable.config import InklingConfig, LayerSpec
from inkling_portable.prefix import Node, PrefixTree

FULL, SLIDING = "full", "sliding"


@dataclass(frozen=True)
class LayerState:
    """One decoder layer's caches: K and V pages `[P, page, Hkv, D]` and the rings `[S, R, C]` of its convolutions.

    `kv_scales` are the scales of K and V in an fp8 cache.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    kv_conv: torch.Tensor
    attn_conv: torch.Tensor
    mlp_conv: torch.Tensor
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_conv, self.attn_conv, self.mlp_conv


@dataclass(frozen=True)
class Batch:
    """The rows of one step: which sequences they belong to, where they stand and where their state lives.

    `cu_seqlens` `[B+1]`, `kv_lens` `[B]` (tokens including this step's rows) and `slots` `[B]` are int32; `tables`
    and `slot_mapping` are per kind of layer: `[B, max_pages]` int32 with -1 for absent pages, `[T]` int64 flat cache
    slots. `states` is indexed by layer; without it nothing is kept, every sequence starts here and all are equally
    long (training). Where a host keeps the convolutions' inputs in pages, `slots` is their block table `[B, N]`. No
    sequence has more rows than `max_query_len` nor more tokens than `max_kv_len`, which the host knows without reading
    a tensor (None: unknown). Sequences of at most `decode_query_len` rows generate, whatever others do (None: not
    known). These numbers choose between kernels. A captured step states its graph's bounds.
    """

    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    tables: dict[str, torch.Tensor]
    slot_mapping: dict[str, torch.Tensor]
    states: Sequence[LayerState] | Mapping[int, LayerState] | None
    max_query_len: int | None = None
    max_kv_len: int | None = None
    decode_query_len: int | None = None

    @classmethod
    def uncached(cls, sequences: int, tokens: int, device: torch.device | str = "cpu") -> Batch:
        """`sequences` sequences of `tokens` rows each, from position 0, with no state before or after."""
        index = torch.arange(sequences, dtype=torch.int32, device=device)
        return cls(
            cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens,
            kv_lens=torch.full_like(index, tokens),
            slots=index,
            tables=dict.fromkeys((FULL, SLIDING), index[:, None]),
            slot_mapping={},
            states=None,
            max_query_len=tokens,
            max_kv_len=tokens,
        )


@dataclass
class SequenceState:
    """A running sequence: its ring row, its pages by kind (-1 behind the window), and how many tokens are computed."""

    slot: int
    pages: dict[str, list[int]]
    promised: dict[str, int]
    length: int = 0
    written: int = 0  # positions written so far, rejected drafts included
    node: Node | None = None  # deepest node of the prefix tree that this sequence has gone through
    mtp_length: int = 0  # positions whose multi-token-prediction entries are final at every depth
    hidden: torch.Tensor | None = None  # the backbone's normed hidden states of the newest positions

    def newest_hidden(self, rows: int) -> torch.Tensor:
        """The last `rows` of `hidden` (all of them where it has fewer)."""
        if self.hidden is None:
            raise RuntimeError("no hidden states are kept: the sequence has not run since it was opened")
        return self.hidden[max(len(self.hidden) - rows, 0) :]


@dataclass
class _PagePool:
    """Pages of one kind: free ones, and how many sequences hold each of the others."""

    size: int
    free: deque[int] = field(init=False)
    holders: list[int] = field(init=False)
    promised: int = 0

    def __post_init__(self) -> None:
        # Taken in the order they were given back, so that the pages of a sequence tend to be neighbours.
        self.free = deque(range(self.size))
        self.holders = [0] * self.size


class Cache:
    """All state of up to `max_seqs` running sequences, and of prefixes worth keeping.

    `num_pages` gives the pages of each kind; see `pages_needed` for what a sequence takes at most. `draft_rows` is
    how many positions past the committed ones a step may write (drafts of speculative decoding); `mtp_layers` their
    depths.
    """

    def __init__(
        self,
        config: InklingConfig,
        *,
        page_size: int,
        num_pages: dict[str, int],
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device | str,
        draft_rows: int = 0,
        mtp_layers: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        if prefix_caching and mtp_layers > page_size:
            raise ValueError(
                f"block_size is {page_size}; prefix caching with {mtp_layers} drafts needs blocks of at least "
                f"{mtp_layers} tokens: raise block_size, or switch prefix caching off"
            )
        self.config, self.page_size, self.device = config, page_size, torch.device(device)
        self.draft_rows, self.mtp_layers, self.prefix_caching = draft_rows, mtp_layers, prefix_caching
        # Room for the drafts twice: once so that rejecting them needs no roll-back, once so that the rows before a page
        # boundary which accepted drafts have just crossed can still be kept for reuse.
        self.ring = max(config.conv_kernel_size - 1 + 2 * draft_rows, 1)
        self.pools = {kind: _PagePool(count) for kind, count in num_pages.items()}
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._prefixes = PrefixTree(page_size, mtp_layers, tuple(num_pages))
        specs = [config.layer(i) for i in range(config.num_hidden_layers)]
        specs += [config.mtp_layer(d) for d in range(mtp_layers)]
        self._kinds = [kind_of(spec) for spec in specs]
        self.layers = [self._layer(spec, num_pages[kind_of(spec)], max_seqs, dtype) for spec in specs]

    def _layer(self, spec: LayerSpec, pages: int, max_seqs: int, dtype: torch.dtype) -> LayerState:
        # Keys of a head lie side by side, so the pages of a sequence that are neighbours read as one matrix.
        def kv() -> torch.Tensor:
            shape = (spec.num_kv_heads, pages, self.page_size, spec.head_dim)
            return torch.empty(shape, dtype=dtype, device=self.device).permute(1, 2, 0, 3)

        def ring(channels: int) -> torch.Tensor:
            return torch.empty(max_seqs, self.ring, channels, dtype=dtype, device=self.device)

        hidden = self.config.hidden_size
        return LayerState(kv(), kv(), ring(2 * spec.kv_size), ring(hidden), ring(hidden))

    # -- sequences ---------------------------------------------------------------------------------------------------

    def pages_needed(self, tokens: int, chunk: int) -> dict[str, int]:
        """Pages of each kind that a sequence of `tokens` tokens holds at most, advancing `chunk` tokens a step."""
        full = -(-(tokens + self.draft_rows) // self.page_size)
        live = self.config.sliding_window_size + chunk + self.draft_rows + self.mtp_layers
        return {FULL: full, SLIDING: min(full, -(-live // self.page_size) + 1)}

    def fits(self, tokens: int, chunk: int) -> bool:
        """Whether a sequence of at most `tokens` tokens can be opened now and run to its end."""
        need = self.pages_needed(tokens, chunk)
        return bool(self._free_slots) and all(p.promised + need[kind] <= p.size for kind, p in self.pools.items())

    def open(self, keys: Sequence[int], max_tokens: int, chunk: int) -> SequenceState:
        """Admit a sequence whose tokens are named by `keys`, behind the longest prefix whose whole state is here.

        At least the last token is left to compute. Call `fits` first.
        """
        promised = self.pages_needed(max_tokens, chunk)
        seq = SequenceState(self._free_slots.pop(), {kind: [] for kind in self.pools}, promised)
        for kind, pool in self.pools.items():
            pool.promised += promised[kind]
        path = self._match(keys) if self.prefix_caching else []
        if path:
            seq.node = path[-2] if len(path) > 1 else None
            seq.length = seq.written = len(path) * self.page_size
            live = self._first_live_page(seq.length)
            for kind in self.pools:
                for i, step in enumerate(path):
                    page = step.pages[kind] if kind == FULL or i >= live else None
                    seq.pages[kind].append(-1 if page is None else page)
                    if page is not None:
                        self.pools[kind].holders[page] += 1
            self._copy_last_page(seq)
            self._restore(seq, path[-1])
            self._prefixes.touch(path[-1])
        return seq

    def _copy_last_page(self, seq: SequenceState) -> None:
        """Give the sequence a copy of its last page, where it will compute entries of prediction depths again."""
        for kind in self.pools if self.mtp_layers else ():
            shared, own = seq.pages[kind][-1], self._take(kind)
            for state, of in zip(self.layers, self._kinds, strict=True):
                if of == kind:
                    state.k_pages[own], state.v_pages[own] = state.k_pages[shared], state.v_pages[shared]
            self._release(kind, shared)
            seq.pages[kind][-1] = own

    def close(self, seq: SequenceState) -> None:
        """Give back what the sequence holds; pages that the prefix tree names stay until their room is needed."""
        for kind, pool in self.pools.items():
            pool.promised -= seq.promised[kind]
            for page in seq.pages[kind]:
                if page >= 0:
                    self._release(kind, page)
        self._prefixes.touch(seq.node)
        self._free_slots.append(seq.slot)

    def batch(self, seqs: Sequence[SequenceState], rows: Sequence[int], start: Sequence[int] | None = None) -> Batch:
        """Describe a step of `rows[b]` rows for each sequence, from its length on (or from `start[b]`), taking pages
        for it.
        """
        starts = [seq.length for seq in seqs] if start is None else list(start)
        for seq, first, n in zip(seqs, starts, rows, strict=True):
            for kind in self.pools:
                while len(seq.pages[kind]) * self.page_size < first + n:
                    seq.pages[kind].append(self._take(kind))
            seq.written = max(seq.written, first + n)
        ends = [first + n for first, n in zip(starts, rows, strict=True)]
        cu = [0]
        for n in rows:
            cu.append(cu[-1] + n)

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        tables, slot_mapping = {}, {}
        owner = torch.repeat_interleave(torch.arange(len(seqs)), torch.tensor(rows))
        offset = torch.tensor([first - at for first, at in zip(starts, cu, strict=False)])
        position = torch.arange(cu[-1]) + offset[owner]
        for kind in self.pools:
            width = max((-(-end // self.page_size) for end in ends), default=0)
            table = [(seq.pages[kind][:width] + [-1] * width)[:width] for seq in seqs]
            tables[kind] = int32(table).view(len(seqs), width)  # type: ignore[arg-type]
            page = tables[kind].cpu()[owner, position // self.page_size].long()
            slot_mapping[kind] = (page * self.page_size + position % self.page_size).to(self.device)
        slots, longest = int32([s.slot for s in seqs]), (max(rows, default=0), max(ends, default=0))
        few = 1 + self.draft_rows
        return Batch(int32(cu), int32(ends), slots, tables, slot_mapping, self.layers, *longest, few)

    def advance(self, seq: SequenceState, tokens: int) -> None:
        """Commit `tokens` more positions of the step just run."""
        seq.length += tokens

    def retire(self, seq: SequenceState) -> None:
        """Give back the sliding pages that no window reaches again. Prediction depths run behind the backbone: first
        they must have reached the committed length.
        """
        pages, i = seq.pages[SLIDING], self._first_live_page(seq.length) - 1
        # What lies before a page that went back went back with it or earlier.
        while i >= 0 and pages[i] >= 0:
            self._release(SLIDING, pages[i])
            pages[i] = -1
            i -= 1

    def _first_live_page(self, length: int) -> int:
        oldest = length - self.mtp_layers - self.config.sliding_window_size + 1
        return max(0, oldest // self.page_size)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _take(self, kind: str) -> int:
        pool = self.pools[kind]
        if not pool.free:
            page = self._prefixes.give_up(kind, pool.holders)
            if page is None:
                raise RuntimeError(
                    f"no {kind} page is left for a sequence that was admitted; admission must ask fits()"
                )
            pool.free.append(page)
        page = pool.free.popleft()
        pool.holders[page] = 1
        return page

    def _release(self, kind: str, page: int) -> None:
        pool = self.pools[kind]
        pool.holders[page] -= 1
        if pool.holders[page] == 0 and not self._prefixes.holds(kind, page):
            pool.free.append(page)

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def register(self, seq: SequenceState, keys: Sequence[int]) -> None:
        """Remember the pages that the sequence has filled, and the rings at the last boundary where they still hold
        it.
        """
        if not self.prefix_caching:
            return
        boundary = seq.length // self.page_size
        done = seq.node.depth if seq.node else 0
        while done < boundary:
            pages = {kind: seq.pages[kind][done] for kind in self.pools}
            if done == boundary - 1:
                self._register_end(seq, keys, pages)
            if (done + 1) * self.page_size + self.mtp_layers > len(keys):
                break
            seq.node, done = self._prefixes.add_through(seq.node, keys, pages), done + 1

    def _register_end(self, seq: SequenceState, keys: Sequence[int], pages: dict[str, int]) -> None:
        """Make the last page boundary a place to start at, if the state there is still whole."""
        known = self._prefixes.find_end(seq.node, keys)
        at = seq.length // self.page_size * self.page_size
        first = max(at - self.config.conv_kernel_size + 1 - self.mtp_layers, 0)
        if (known is not None and known.snapshot is not None) or first < seq.written - self.ring:
            return
        hidden = None
        if self.mtp_layers:
            first, held = max(at - self.mtp_layers, 0), seq.hidden
            if held is None or not seq.length - len(held) <= first <= seq.mtp_length:
                return
            hidden = held[first - seq.length + len(held) : at - seq.length + len(held)].clone()
        index = self._ring_rows(at)
        snapshot = [ring[seq.slot, index] for layer in self.layers for ring in layer.rings]
        self._prefixes.add_end(seq.node, keys, pages, snapshot, hidden)

    def _ring_rows(self, at: int) -> torch.Tensor:
        first = max(0, at - self.config.conv_kernel_size + 1 - self.mtp_layers)
        return torch.arange(first, at, device=self.device) % self.ring

    def _restore(self, seq: SequenceState, node: Node) -> None:
        index = self._ring_rows(seq.length)
        rings = [ring for layer in self.layers for ring in layer.rings]
        for ring, rows in zip(rings, node.snapshot or (), strict=True):
            ring[seq.slot, index] = rows
        if self.mtp_layers:
            seq.mtp_length = max(0, seq.length - self.mtp_layers)
            seq.hidden = node.hidden

    def _match(self, keys: Sequence[int]) -> list[Node]:
        """The longest chain of pages of `keys`, short of the last token, at whose end every kind of state exists."""
        for path in self._prefixes.prefixes(keys, FULL):
            live = self._first_live_page(len(path) * self.page_size)
            if path[-1].snapshot is not None and all(node.pages[SLIDING] is not None for node in path[live:]):
                return path
        return []


def kind_of(spec: LayerSpec) -> str:
    """Which of the two block tables a layer uses."""
    return SLIDING if spec.sliding else FULL
