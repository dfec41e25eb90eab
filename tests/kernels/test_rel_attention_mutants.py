"""Broken copies of the attention kernels, every one of which the comparison with the oracle must catch.

Each is caught on ordinary batches, by the tolerance that the other tests use; how far it exceeds that is printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_oracle import Exact, exact_attention, signal
from mutants import broken

from inkling_kernels.testing import PagedBatch, paged_batch

FILES = (
    "target",
    "compile_case",
    "fp8",
    "ragged",
    "rel_attention_plan",
    "rel_attention_tile",
    "rel_attention",
    "rel_attention_decode",
)
RAGGED, _, TILE, PREFILL, DECODE = FILES[3:]

# name, file, text, what stands there instead
BROKEN = [
    ("no bias", TILE, "tl.dot(r_wide, p_wide,", "tl.dot(r_wide * 0, p_wide,"),
    ("bias one late", TILE, "(first - key)[None, :] +", "(first - key + 1)[None, :] +"),
    ("bias one early", TILE, "(first - key)[None, :] +", "(first - key - 1)[None, :] +"),
    ("window + 1", TILE, "distance < window", "distance <= window"),
    ("window - 1", TILE, "distance < window", "distance < window - 1"),
    ("window + 1 read", PREFILL, "low = tl.maximum(first - window + 1, 0)", "low = tl.maximum(first - window + 2, 0)"),
    ("extent + 1", TILE, "inside = distance < extent", "inside = distance <= extent"),
    ("extent - 1", TILE, "inside = distance < extent", "inside = distance < extent - 1"),
    ("1/sqrt(d)", TILE, "score * scale", "score * tl.sqrt(scale)"),
    ("no scale beyond the extent", TILE, "bits = scale * LOG2E", "bits = LOG2E"),
    ("a total in nats", TILE, "decay = tl.exp2(peak - raised)", "decay = tl.exp(peak - raised)"),
    ("no bias in the last tiles", PREFILL, "True, WINDOW=False, CAUSAL=True", "False, WINDOW=False, CAUSAL=True"),
    ("no bias at the window's edge", PREFILL, "True, WINDOW=True, CAUSAL=True", "False, WINDOW=True, CAUSAL=True"),
    ("window's edge one tile short", PREFILL, "first + TOKENS - window + BLOCK_N - 1", "first + TOKENS - window"),
    ("the step's keys unmasked", PREFILL, "edge = tl.maximum(tl.maximum(first + 1,",
     "edge = tl.maximum(tl.maximum(high + BLOCK_N,"),
    ("0 * NaN in rows of the tile", TILE, "v = tl.where(nought == 0.0, v, 0.0)", "v = v"),
    ("NaN hidden from the rows that see it", TILE, "weight += tl.where(weight > 0.0,", "weight += 0 * tl.where(False,"),
    ("NaN for rows of no weight", TILE, "tl.where(weight > 0.0, spoils", "tl.where(weight >= 0.0, spoils"),
    ("far zone one tile long", PREFILL, "first + 1 - extent, 0) //", "first + 1 + BLOCK_N - extent, 0) //"),
    ("sees one key ahead", TILE, "score = tl.where(distance >= 0, score", "score = tl.where(distance >= -1, score"),
    ("does not see itself", TILE, "distance >= 0,", "distance > 0,"),
    ("position without the past", PREFILL, "q_len, first + t0, -TOKENS", "q_len, t0, -TOKENS"),
    ("position one late", PREFILL, "q_len, first + t0, -TOKENS", "q_len, first + t0 + 1, -TOKENS"),
    ("heads in the wrong order", PREFILL, "head = kv_head * GROUP + row % GROUP", "head = kv_head + row % GROUP"),
    ("sums not rescaled", TILE, "v, acc * decay[:, None]", "v, acc"),
    ("totals not rescaled", TILE, "total = total * decay +", "total = total +"),
    ("slots of half a page", TILE, "(col % PAGE)", "(col % (PAGE // 2))"),
    ("page of the window's edge not read", TILE, "number * PAGE + PAGE > low", "number * PAGE > low"),
    ("last page not read", TILE, "number * PAGE < high", "number * PAGE + PAGE < high"),
    ("values of masked keys read", TILE, "v_at, held,", "v_at, key < high,"),
    ("keys past the end read", TILE, "held = (key >= low) & (key < high)", "held = (key >= low) & (key < high + 1)"),
    ("0/0 on rows without keys", PREFILL, "tl.where(total == 0.0, 1.0, total)", "total"),
    ("first sequence everywhere", PREFILL, "seq.to(tl.int64) * table_stride", "0 * table_stride"),
    ("tiles one sequence off", RAGGED, "// BLOCK_T + middle <= tile", "// BLOCK_T + middle < tile"),
    ("a split tile dropped", DECODE, "// BLOCK_N + SPLITS - 1) // SPLITS * BLOCK_N", "// BLOCK_N) // SPLITS * BLOCK_N"),
    ("splits not weighted", DECODE, "part * new[:, None]", "part"),
    ("split totals not weighted", DECODE, "part_total * new", "part_total"),
    ("partial results of all sequences in one place", DECODE, "num_programs(2) + seq)", "num_programs(2) + 0 * seq)"),
    ("one split not combined", DECODE, "for split in range(used)", "for split in range(1, used)"),
    ("bias of the ninth row lost", TILE, "tl.dot(r_extra, p_wide,", "tl.dot(r_extra * 0, p_wide,"),
    ("ninth row's bias at the first's", TILE, "first + TOKENS, key", "first, key"),
    ("verify: window's edge one tile short", DECODE, "first + ROWS - window + BLOCK_N - 1", "first + ROWS - window"),
    ("verify: the step's keys unmasked", DECODE,
     "tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, begin), end)", "end, begin), end)"),
    ("0 * NaN not told", TILE, "return found != found", "return found == float('inf')"),
    ("told by the least of a row", TILE, "tl.sum(acc)", "tl.sum(tl.min(acc, 1))"),
    ("verify: 0 * NaN not asked", DECODE, "if spoilt_fn(acc):", "if False:"),
    ("made again from the last tiles on", PREFILL, "low // BLOCK_N * BLOCK_N, high,", "edge, high,"),
    ("verify: made again from the last tiles on", DECODE, "token, start, end", "token, begin, end"),
    ("decode position one late", DECODE, "first = kv_len - q_len", "first = kv_len - q_len + 1"),
    ("decode window + 1 read", DECODE, "tl.maximum(first - window + 1, 0)", "tl.maximum(first - window + 2, 0)"),
    ("0/0 in the combination", DECODE, "1.0 / tl.where(total == 0.0, 1.0, total)", "1.0 / total"),
    ("fp8 values unscaled", PREFILL, "out *= tl.load(v_scale_ptr", "out *= 1 + 0 * tl.load(v_scale_ptr"),
    ("fp8 keys unscaled", PREFILL, "scale *= tl.load(k_scale_ptr", "scale *= 1 + 0 * tl.load(k_scale_ptr"),
]  # fmt: skip


def cases(device: torch.device) -> list[tuple[str, PagedBatch, Exact, dict]]:
    """Batches that together reach every line, smallest first, with the launcher and its further arguments."""
    options = {"heads": 4, "kv_heads": 2, "extent": 24, "device": device, "unused_pages": (0, 0)}
    cheap, verify, single = [(3, 3), (1, 0), (9, 50)], [(9, 75), (1, 40), (1, 0)], [(1, 75), (1, 0), (1, 40)]
    # Where values are not finite, tiles are attended again, which hides what is wrong the first time. So each batch
    # comes all finite, then with NaN around what rows may see and, in one sequence, in values of this step or about to
    # leave the window of a few rows.
    shapes: list[tuple[str, list[tuple[int, int]], int | None, dict, int, list[int]]] = [
        (PREFILL, cheap, 20, {}, 2, [25, 45]),
        (PREFILL, [(3, 3), (18, 90)], None, {}, 1, [84]),
        (DECODE, verify, 20, {"max_query_len": 9}, 0, [50, 72]),
        (DECODE, verify, None, {"max_query_len": 9}, 0, [72]),
        (DECODE, single, 20, {"max_query_len": 1}, 0, []),
    ]
    found: list[tuple[str, PagedBatch, Exact, dict]] = []
    for file, lengths, window, more, sequence, positions in shapes:
        for finite in (True, False):
            batch = paged_batch(lengths, window=window, **options, seed=1 + len(found))
            for position in positions * (not finite):
                spoil(batch, sequence, position)
            if finite:
                for pages in (batch.k_pages, batch.v_pages):
                    pages.nan_to_num_(nan=3.0)
                batch.proj = torch.nn.functional.pad(batch.proj.t(), (0, 0, 64, 64))[64:-64].t()
            exact = exact_attention(batch)
            exact.out[exact.out.isnan().any(-1)] = float("nan")
            found.append((file, batch, exact, more))
    narrow = paged_batch([(4, 20)], **options, seed=5)
    scales = torch.tensor([0.5, 2.0], device=device)
    for pages, dense in ((narrow.k_pages, narrow.keys), (narrow.v_pages, narrow.values)):
        pages[:] = pages.to(torch.float8_e4m3fn)
        dense[0][:] = dense[0].to(torch.float8_e4m3fn).float() * scales.cpu()[:, None]
    exact = exact_attention(narrow)
    narrow.k_pages, narrow.v_pages = (x.to(torch.float8_e4m3fn) for x in (narrow.k_pages, narrow.v_pages))
    found.append((PREFILL, narrow, exact, {"kv_scales": (scales, scales)}))
    for _, batch, _, _ in found:
        # A copy that reads past a table finds page 0 there, not an address of nothing, at which the process would end.
        batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 8))
    return found


def spoil(batch: PagedBatch, sequence: int, position: int) -> None:
    """Make NaN of a value of the sequence."""
    batch.v_pages[int(batch.block_table[sequence, position // 16]), position % 16, 1, 5] = float("nan")
    batch.values[sequence][position, 1, 5] = float("nan")


def largest_signal(modules: dict, device: torch.device) -> float:
    """The largest error over the cases as a multiple of the tolerance, up to the first that exceeds it."""
    largest = 0.0
    for file, batch, exact, more in cases(device):
        module = modules[file]
        if file == DECODE:
            more = more | {"config": modules["rel_attention_plan"].RelAttentionDecodeConfig(min_keys=32)}
        out = getattr(module, file)(*batch.args, **batch.options, **more)
        largest = max(largest, signal(out, exact))
        if largest > 1:
            break
    return largest


def test_the_unbroken_copy_passes(kernel_device: torch.device, tmp_path: Path) -> None:
    modules = broken(tmp_path, "unbroken", FILES, TILE, "tl.exp2", "tl.exp2")
    assert largest_signal(modules, kernel_device) <= 1


def test_every_broken_copy_is_caught(
    kernel_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, missed = [], []
    for number, (name, file, text, instead) in enumerate(BROKEN):
        modules = broken(tmp_path, f"broken_{number}", FILES, file, text, instead)
        found = largest_signal(modules, kernel_device)
        lines.append(f"{found:10.3g} times the tolerance: {name}")
        if not found > 1:
            missed.append(name)
    with capsys.disabled():
        print(
            f"\n{len(BROKEN) - len(missed)} of {len(BROKEN)} broken copies of the attention kernels caught",
            *lines,
            sep="\n",
        )
    assert not missed
    assert len(BROKEN) >= 20
