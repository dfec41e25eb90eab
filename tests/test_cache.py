"""Pages, rings and kept prefixes: accounting, eviction, and no reuse that changes a logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from dense_model import Dense
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned_model import build_tuned, tuned_config, tuned_tensors

from inkling_portable.cache import FULL, SLIDING, Batch, Cache, SequenceState
from inkling_portable.config import InklingConfig
from inkling_portable.model import Inkling
from inkling_portable.prefix import Node

WINDOW, PAGE = 8, 4
KINDS = (FULL, SLIDING)


@pytest.fixture(scope="module")
def config() -> InklingConfig:
    return tuned_config(1, log_scaling_n_floor=20, sliding_window_size=WINDOW, rel_extent=24)


@pytest.fixture(scope="module")
def models(config: InklingConfig) -> tuple[Inkling, Dense]:
    """The model under test, and the same weights in float64 without any state."""
    tensors = tuned_tensors(config, noise=1.0, embed_norm=True)
    return build_tuned(config, tensors, 0)[0], Dense(config, tensors)


def new_cache(
    config: InklingConfig, full: int, sliding: int, *, page: int = PAGE, seqs: int = 4, prefixes: bool = True
) -> Cache:
    return Cache(
        config, page_size=page, num_pages={FULL: full, SLIDING: sliding}, max_seqs=seqs, dtype=torch.float32,
        device="cpu", prefix_caching=prefixes,
    )  # fmt: skip


@dataclass
class Running:
    tokens: list[int]
    seq: SequenceState
    logits: list[torch.Tensor] = field(default_factory=list)


def poison(cache: Cache, seqs: Sequence[SequenceState]) -> None:
    """NaN wherever nothing of value is: in pages that nobody holds or keeps, and in rings of nobody."""
    slots = [s for s in range(len(cache.layers[0].kv_conv)) if s not in [seq.slot for seq in seqs]]
    for index, layer in enumerate(cache.layers):
        kind = SLIDING if cache.config.layer(index).sliding else FULL
        for pages in (layer.k_pages, layer.v_pages):
            pages[cache.pools[kind].free] = float("nan")
        for ring in layer.rings:
            ring[slots] = float("nan")


@torch.inference_mode()
def step(model: Inkling, cache: Cache, running: Sequence[Running], rows: Sequence[int]) -> None:
    """Advance each of `running` by so many of its tokens and note the logits of all of them."""
    poison(cache, [r.seq for r in running])
    batch = cache.batch([r.seq for r in running], rows)
    ids = [t for r, n in zip(running, rows, strict=True) for t in r.tokens[r.seq.length : r.seq.length + n]]
    logits = model.logits(model(model.embedding(torch.tensor(ids)), batch))
    for r, n, part in zip(running, rows, logits.split(list(rows)), strict=True):
        r.logits.append(part)
        cache.advance(r.seq, n)
        cache.retire(r.seq)
        cache.register(r.seq, r.tokens)


def run(model: Inkling, cache: Cache, tokens: list[int], chunk: int = 100) -> tuple[int, torch.Tensor]:
    """One sequence from start to end, its steps ending at page boundaries where they reach one: how many tokens it
    found done, and the logits of the others."""
    running = Running(tokens, cache.open(tokens, len(tokens), chunk))
    reused = running.seq.length
    while (at := running.seq.length) < len(tokens):
        end = min(at + chunk, len(tokens))
        boundary = end // cache.page_size * cache.page_size
        step(model, cache, [running], [(boundary if boundary > at else end) - at])
    cache.close(running.seq)
    return reused, torch.cat(running.logits)


def check(dense: Dense, tokens: list[int], logits: torch.Tensor) -> None:
    exact = dense.logits(dense.hidden(tokens))[len(tokens) - len(logits) :]
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=2e-4)


def text(count: int, seed: int) -> list[int]:
    return torch.randint(0, 116, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def balanced(cache: Cache, seqs: Sequence[SequenceState] = ()) -> None:
    """Each page is free, kept as a prefix or held by as many sequences as the pool says; none holds more than asked."""
    for kind, pool in cache.pools.items():
        held = [page for seq in seqs for page in seq.pages[kind] if page >= 0]
        assert pool.promised == sum(seq.promised[kind] for seq in seqs) <= pool.size
        for seq in seqs:
            assert sum(page >= 0 for page in seq.pages[kind]) <= seq.promised[kind]
        assert len(set(pool.free)) == len(pool.free)
        for page in range(pool.size):
            assert pool.holders[page] == held.count(page)
            kept = cache._prefixes.holds(kind, page)
            assert (page in pool.free) == (not kept and page not in held), f"{kind} page {page}"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page=st.sampled_from([1, 3, 4, 16]), sequences=st.integers(1, 4), spare=st.integers(0, 30))
def test_no_page_is_lost_or_held_twice(data: st.DataObject, page: int, sequences: int, spare: int) -> None:
    """Sequences of two-letter texts come, advance together and go, in caches that are nearly too small."""
    config = tuned_config(1, sliding_window_size=WINDOW, rel_extent=24)
    chunk = data.draw(st.integers(1, 12))
    probe = new_cache(config, 1, 1, page=page).pages_needed(40, chunk)
    cache = new_cache(config, probe[FULL] + spare // page, probe[SLIDING] + spare // page, page=page, seqs=sequences)
    running: list[Running] = []
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
        if cache.fits(len(tokens), chunk):
            seq = cache.open(tokens, len(tokens), chunk)
            assert seq.length < len(tokens)
            running.append(Running(tokens, seq))
        balanced(cache, [r.seq for r in running])
        if running:
            rows = [min(data.draw(st.integers(1, chunk)), len(r.tokens) - r.seq.length) for r in running]
            cache.batch([r.seq for r in running], rows)
            for r, n in zip(running, rows, strict=True):
                cache.advance(r.seq, n)
                cache.retire(r.seq)
                cache.register(r.seq, r.tokens)
            balanced(cache, [r.seq for r in running])
        for r in list(running):
            if r.seq.length == len(r.tokens) or data.draw(st.integers(0, 9)) == 0:
                running.remove(r)
                cache.close(r.seq)
        balanced(cache, [r.seq for r in running])
    for r in running:
        cache.close(r.seq)
    balanced(cache)
    assert all(pool.promised == 0 for pool in cache.pools.values())
    assert cache.fits(40, chunk)


@pytest.mark.parametrize("chunk", [1, 5, 20])
def test_sliding_pages_go_back_behind_the_window(config: InklingConfig, chunk: int) -> None:
    cache = new_cache(config, 100, 30, prefixes=False)
    seq = cache.open(text(400, 0), 400, chunk)
    most = 0
    for _ in range(0, 400, chunk):
        batch = cache.batch([seq], [chunk])
        held = [page for page in seq.pages[SLIDING] if page >= 0]
        most = max(most, len(held))
        # Everything that the rows of this step may see is there, in place.
        first = max(0, seq.length - WINDOW + 1) // PAGE
        assert batch.tables[SLIDING][0, first : (seq.length + chunk - 1) // PAGE + 1].min() >= 0
        cache.advance(seq, chunk)
        cache.retire(seq)
    assert most <= -(-(WINDOW + chunk) // PAGE) + 1
    assert sum(page >= 0 for page in seq.pages[SLIDING]) <= -(-WINDOW // PAGE) + 1
    assert (batch.tables[SLIDING][0, :50] == -1).all()
    assert sum(page >= 0 for page in seq.pages[FULL]) == 100
    cache.close(seq)
    balanced(cache)


def test_a_batch_states_its_longest_query_and_context(config: InklingConfig) -> None:
    """What the host knows is what the tensors say; nothing is known of a batch that somebody else makes."""
    cache = new_cache(config, 20, 20)
    seqs = [cache.open(list(range(40)), 40, 40) for _ in range(3)]
    for rows in ([9, 1, 20], [1, 1, 1], [0, 3, 1], [0, 0, 0]):
        batch = cache.batch(seqs, rows)
        assert batch.max_query_len == int(batch.cu_seqlens.diff().max()) == max(rows)
        assert batch.max_kv_len == int(batch.kv_lens.max())
        for seq, n in zip(seqs, rows, strict=True):
            cache.advance(seq, n)
    whole = Batch.uncached(2, 7)
    assert (whole.max_query_len, whole.max_kv_len) == (7, 7)
    assert Batch(whole.cu_seqlens, whole.kv_lens, whole.slots, {}, {}, None).max_query_len is None


def test_the_rings_depend_on_sequences_alone(config: InklingConfig) -> None:
    """Three rows a sequence and site, whatever the lengths, chunks and pages."""
    for full, page in ((10, 4), (1000, 64)):
        for layer in new_cache(config, full, full, page=page, seqs=5).layers:
            assert [ring.shape[:2] for ring in layer.rings] == [(5, 3)] * 3


def test_lengths_5_and_40_in_one_batch(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    """And sequences that start, extend and decode in one step."""
    model, dense = models
    cache = new_cache(config, 60, 60)
    running = [Running(tokens, cache.open(tokens, 60, 40)) for tokens in (text(5, 1), text(40, 2), text(21, 3))]
    for rows in ([4, 20, 1], [1, 19, 7], [1, 12]):
        step(model, cache, running[-len(rows) :], rows)
    for r in running:
        check(dense, r.tokens[: r.seq.length], torch.cat(r.logits))
    balanced(cache, [r.seq for r in running])


def drop_snapshots(cache: Cache) -> None:
    for node in cache._prefixes._recent:
        node.snapshot = None


def drop_pages(cache: Cache, kind: str, count: int) -> None:
    """Take the oldest kept pages of a kind away, as another sequence in need would."""
    for _ in range(count):
        page = cache._prefixes.give_up(kind, cache.pools[kind].holders)
        if page is not None:
            cache.pools[kind].free.append(page)


def test_a_hit_needs_every_kind_of_state(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    """With convolution state or sliding pages gone, the prefix is computed again, never taken in part."""
    model, dense = models
    tokens = text(42, 4)
    for loss, expected in (
        (lambda cache: None, 40),
        (drop_snapshots, 0),
        (lambda cache: drop_pages(cache, SLIDING, 100), 0),
        (lambda cache: drop_pages(cache, FULL, 100), 0),
        (lambda cache: drop_pages(cache, FULL, 1), 0),
    ):
        cache = new_cache(config, 40, 40)
        check(dense, tokens, run(model, cache, tokens)[1])
        loss(cache)
        reused, logits = run(model, cache, tokens)
        assert reused == expected
        check(dense, tokens, logits)
        balanced(cache)
        assert run(model, cache, tokens)[0] == 40, "what was computed again is kept again"


def test_a_hit_shrinks_to_the_last_place_that_is_whole(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    """With the newest snapshots gone an older one serves, if the sliding pages of its window are there too."""
    model, dense = models
    tokens = text(41, 5)
    cache = new_cache(config, 40, 40)
    run(model, cache, tokens, chunk=12)

    def ends() -> dict[int, Node]:
        return {node.depth * PAGE: node for node in cache._prefixes._recent if node.snapshot}

    assert sorted(ends()) == [12, 24, 36, 40]
    ends()[40].snapshot = None
    reused, logits = run(model, cache, tokens)
    assert reused == 36
    check(dense, tokens, logits)
    for at in (36, 40):
        ends()[at].snapshot = None
    # The window before 24 begins in the page of 16..19.
    ends()[24].parent.pages[SLIDING] = None
    reused, logits = run(model, cache, tokens)
    assert reused == 12
    check(dense, tokens, logits)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), page=st.sampled_from([2, 4, 16]), spare=st.integers(0, 40))
def test_reuse_under_pressure_never_changes_a_logit(
    models: tuple[Inkling, Dense], data: st.DataObject, page: int, spare: int
) -> None:
    """Texts that share beginnings, caches that are too small to keep them all, and random losses in between."""
    model, _ = models
    config, chunk = model.config, data.draw(st.integers(3, 30))
    need = new_cache(config, 1, 1, page=page).pages_needed(50, chunk)
    cache = new_cache(config, need[FULL] + spare // page, need[SLIDING] + spare // page, page=page)
    stems = [text(30, seed) for seed in (1, 2)]
    for _ in range(data.draw(st.integers(2, 7))):
        stem = data.draw(st.sampled_from(stems))
        tokens = stem[: data.draw(st.integers(1, 30))] + text(
            data.draw(st.integers(0, 20)), data.draw(st.integers(3, 6))
        )
        reused, logits = run(model, cache, tokens, chunk)
        with torch.inference_mode():
            whole = model.logits(model(model.embedding(torch.tensor(tokens)), Batch.uncached(1, len(tokens))))
        torch.testing.assert_close(logits, whole[reused:], rtol=0, atol=2e-5)
        balanced(cache)
        match data.draw(st.integers(0, 4)):
            case 0:
                drop_snapshots(cache)
            case 1:
                drop_pages(cache, SLIDING, data.draw(st.integers(1, 5)))
            case 2:
                drop_pages(cache, FULL, data.draw(st.integers(1, 5)))


def test_the_prefix_used_longest_ago_goes_first(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    model, _ = models
    old, new, third = text(33, 6), text(33, 7), text(33, 8)
    cache = new_cache(config, 20, 60)
    run(model, cache, old)
    run(model, cache, new)
    assert run(model, cache, old)[0] == 32
    run(model, cache, third)
    assert run(model, cache, old)[0] == 32, "it was used after the other"
    assert run(model, cache, new)[0] < 32


def test_a_prefix_loses_its_end_first(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    """Nine pages are kept and three are needed: what remains of the longest chain is its beginning."""
    model, dense = models
    tokens = text(37, 9)
    cache = new_cache(config, 12, 60)
    run(model, cache, tokens, chunk=PAGE)
    run(model, cache, text(22, 10))
    reused, logits = run(model, cache, tokens)
    assert 0 < reused < 36
    check(dense, tokens, logits)


def test_sequences_that_share_a_prefix_run_side_by_side(config: InklingConfig, models: tuple[Inkling, Dense]) -> None:
    """Shared pages stay until the last holder has gone, and no sequence writes into another's."""
    model, dense = models
    stem = text(17, 11)
    cache = new_cache(config, 60, 60)
    run(model, cache, stem)
    both = [Running(stem + text(20, seed), cache.open(stem + text(20, seed), 37, 10)) for seed in (12, 13)]
    assert [r.seq.length for r in both] == [16, 16]
    assert both[0].seq.pages[FULL] == both[1].seq.pages[FULL]
    step(model, cache, both, [10, 3])
    step(model, cache, both, [10, 3])
    cache.close(both[0].seq)
    balanced(cache, [both[1].seq])
    drop_pages(cache, FULL, 100)
    drop_pages(cache, SLIDING, 100)
    while both[1].seq.length < 37:
        step(model, cache, both[1:], [5])
    for r in both:
        check(dense, r.tokens[: r.seq.length], torch.cat(r.logits))


def test_admission_counts_what_was_promised(config: InklingConfig) -> None:
    cache = new_cache(config, 20, 20, seqs=3)
    assert cache.fits(80, 8)
    assert not cache.fits(81, 8)
    first = cache.open(text(10, 0), 50, 8)
    assert cache.fits(28, 8)
    assert not cache.fits(29, 8), "13 pages are promised, though none is taken yet"
    others = [cache.open(text(1, 0), 4, 8) for _ in range(2)]
    assert not cache.fits(1, 8), "all ring slots are taken"
    for seq in (first, *others):
        cache.close(seq)
    assert cache.fits(80, 8)
    balanced(cache)
