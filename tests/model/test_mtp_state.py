"""Every depth's state, held against a float64 model that keeps none, through rejections, pieces and reused prefixes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_model import TOLERANCE, Dense, Watched, errors, prompts, run, watch
from tuned_model import build_tuned, tuned_config, tuned_tensors

from inkling_portable import engine as engine_module
from inkling_portable.cache import LayerState
from inkling_portable.sampling import SamplingParams


@pytest.fixture(scope="module")
def tuned() -> SimpleNamespace:
    """A model with eight depths whose drafts are accepted in part, and its dense double."""
    config = tuned_config(log_scaling_n_floor=20)
    tensors = tuned_tensors(config, noise=0.75, embed_norm=True)
    model, mtp = build_tuned(config, tensors, 8)
    return SimpleNamespace(config=config, model=model, mtp=mtp, dense=Dense(config, tensors))


@pytest.mark.parametrize(
    ("drafts", "local", "chain"),
    [
        (1, (), True),
        (2, (0,), False),
        (3, (1, 2), True),
        (5, (0, 1, 2, 3, 4), False),
        (8, (0, 2, 5), True),
        (8, (), False),
    ],
)
def test_drafts_equal_a_full_recomputation(drafts, local, chain):
    config = tuned_config(8, local, chain, log_scaling_n_floor=20)
    tensors = tuned_tensors(config, noise=0.7, embed_norm=True)
    watched = watch(*build_tuned(config, tensors, drafts))
    run(watched, prompts())
    assert 0 in watched.accepted
    assert max(watched.accepted) > 0
    assert max(errors(Dense(config, tensors), watched)) < TOLERANCE


@pytest.mark.parametrize(("chunk", "block", "lengths"), [(1, 16, (2, 20)), (7, 8, (9, 33)), (30, 16, (2, 9, 33, 65))])
def test_prompts_read_in_pieces(tuned, chunk, block, lengths):
    watched = watch(tuned.model, tuned.mtp, max_num_batched_tokens=chunk, block_size=block)
    run(watched, prompts(lengths), new=12)
    assert max(errors(tuned.dense, watched)) < TOLERANCE


def scripted(tuned: SimpleNamespace, kind: type[Watched] = Watched, new: int = 60) -> tuple[Watched, bool]:
    """An engine after a run in which each step's drafts were right up to a chosen one, and whether the text was."""
    given = prompts((2, 5, 18, 41))
    plain = run(watch(tuned.model, None), given, new)
    right = [p + text for p, text in zip(given, plain, strict=True)]

    def script(index: int, tokens: list[int]) -> list[int]:
        following = (right[index][len(tokens) :] + [0] * 8)[:8]
        accepted = random.Random(f"{index} {len(tokens)}").randrange(9)
        return [token if i < accepted else (token + 1) % 116 for i, token in enumerate(following)]

    watched = watch(tuned.model, tuned.mtp, kind)
    watched.script = script
    return watched, run(watched, given, new) == plain


def test_every_number_of_accepted_drafts(tuned):
    watched, right = scripted(tuned)
    assert right
    assert set(watched.accepted) == set(range(9))
    assert max(errors(tuned.dense, watched)) < TOLERANCE
    for index, request in watched.requests.items():
        counts = [accepted for of, accepted in watched.steps if of == index]
        assert request.timings["steps"] == len(counts)
        assert request.timings["accepted"] == [sum(count > i for count in counts) for i in range(8)]
        assert request.timings["mean_accepted_length"] == pytest.approx(1 + sum(counts) / len(counts))


def test_every_depth_keeps_its_history(tuned):
    """With more than 32 accepted drafts each depth's entries are final up to the tokens that are known."""

    class Lengths(Watched):
        def _draft(self, requests: Any) -> None:
            super()._draft(requests)
            for request in requests:
                if len(request.tokens) > request.prompt_length:
                    known = len(request.tokens) - self.drafts
                    assert request.state.length == len(request.tokens) - 1
                    assert request.state.mtp_length == max(min(request.state.length, known), 0)

    watched, _ = scripted(tuned, Lengths)
    assert sum(watched.accepted) > 4 * 32


def branching(tuned: SimpleNamespace, kind: type[Watched] = Watched, block: int = 8) -> Watched:
    """Texts that part at a page boundary, in a page, and behind it, together; then again, longer; then continued."""
    shared, tails = prompts((48,), seed=3)[0], prompts((1, 2, 7, 20), seed=4)
    watched = watch(tuned.model, tuned.mtp, kind, block_size=block)
    run(watched, [shared + tails[0]], new=4)
    given = [shared + tail for tail in tails] + [shared[:33], shared[:32] + tails[2], shared]
    run(watched, given, new=16)
    run(watched, given, new=30)
    texts = [watched.requests[i].tokens for i in list(watched.requests)[-len(given) :]]
    run(watched, [[*text, 5] for text in texts], new=8)
    return watched


@pytest.mark.parametrize("block", [8, 16])
def test_drafts_behind_a_reused_prefix(tuned, block):
    watched = branching(tuned, block=block)
    reused = [watched.requests[i].timings["reused_tokens"] for i in sorted(watched.requests)]
    lengths = [watched.requests[i].prompt_length for i in sorted(watched.requests)]
    assert reused[1:5] == [48] * 4  # the others of the first round start before anything of theirs is kept
    assert all(at >= 32 for at in reused[8:15])
    # What was generated is a prefix too.
    assert all(length - at <= 2 * block + 8 for at, length in zip(reused[15:], lengths[15:], strict=True))
    assert max(errors(tuned.dense, watched)) < TOLERANCE


def test_drafts_while_pages_are_scarce(tuned):
    watched = watch(tuned.model, tuned.mtp, pages=14, block_size=8, max_num_batched_tokens=16, max_model_len=80)
    shared = prompts((24,), seed=5)[0]
    for seed in range(3):
        run(watched, [shared + tail for tail in prompts((1, 9, 17), seed)] + prompts((30,), seed), new=10)
    assert any(request.timings["reused_tokens"] for request in watched.requests.values())
    assert max(errors(tuned.dense, watched)) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_traffic_of_all_kinds(tuned, seed):
    """Prompts that repeat and continue earlier texts, sampled and greedy, stopped and aborted, pages scarce or not."""
    chance = random.Random(seed)
    watched = watch(
        tuned.model,
        tuned.mtp,
        pages=chance.choice([60, 400]),
        block_size=chance.choice([8, 9, 16]),
        max_num_batched_tokens=chance.choice([5, 17, 100]),
        max_num_seqs=chance.choice([1, 3, 8]),
        max_model_len=120,
    )
    shared, sent = prompts((60,), seed)[0], []
    for _ in range(3):
        for tail in prompts((4, 11, 25), chance.randrange(10**6)):
            earlier = [request.tokens for request in watched.requests.values()]
            base = chance.choice([[], shared, *earlier[-3:]])
            stops = tuple(chance.sample(range(120), 6))
            params = SamplingParams(18, chance.choice([0, 0.8]), seed=seed, stop_token_ids=stops)
            sent.append(watched.submit((base[: chance.randrange(61)] + tail)[:80], params))
        while watched.unfinished():
            watched.step()
            if chance.random() < 0.04:
                watched.abort([chance.choice(sent)])
    assert all(pool.promised == 0 and not any(pool.holders) for pool in watched.cache.pools.values())
    assert max(errors(tuned.dense, watched)) < TOLERANCE


def test_pages_must_hold_a_draft_s_reach(tuned):
    with pytest.raises(ValueError, match="block_size is 4; prefix caching with 8 drafts needs blocks of at least 8"):
        watch(tuned.model, tuned.mtp, block_size=4)
    watched = watch(tuned.model, tuned.mtp, block_size=4, enable_prefix_caching=False)
    run(watched, prompts((9, 18)), new=12)
    assert max(errors(tuned.dense, watched)) < TOLERANCE


def test_media_are_the_depths_inputs_too(tuned):
    generator = torch.Generator().manual_seed(1)
    media = [(2, torch.randn(5, 64, generator=generator)), (9, torch.randn(12, 64, generator=generator))]
    watched = watch(tuned.model, tuned.mtp, max_num_batched_tokens=8)
    watched.submit(prompts((22,))[0], SamplingParams(max_tokens=12, temperature=0), media=media)
    while watched.unfinished():
        watched.step()
    assert max(errors(tuned.dense, watched)) < TOLERANCE


def test_draft_i_comes_from_depth_i(tuned):
    """Eight depths that each draft a token of their own."""

    class Constant(torch.nn.Module):
        depths = range(8)

        def forward(self, depth: int, hidden: torch.Tensor, embedded: torch.Tensor, batch: Any) -> torch.Tensor:
            return tuned.model.unembed[10 * depth + 3].expand(len(hidden), -1)

    watched = watch(tuned.model, Constant())
    run(watched, prompts())
    assert {tuple(drafts) for _, _, drafts, _ in watched.drafted} == {tuple(range(3, 83, 10))}


def test_a_stop_among_the_drafts_ends_there(tuned):
    plain = run(watch(tuned.model, None), prompts((18,)), new=30)[0]
    for cut in range(3, 20, 4):
        stop = plain[cut]
        watched = watch(tuned.model, tuned.mtp)
        assert run(watched, prompts((18,)), new=30, stop_token_ids=(stop,))[0] == plain[: plain.index(stop) + 1]
        again = run(watched, [prompts((18,))[0] + plain[:cut]], new=12)[0]
        assert again == run(watch(tuned.model, None), [prompts((18,))[0] + plain[:cut]], new=12)[0]


# Broken copies. Each must change the text, or be seen by the comparison with the dense model.


class Depth0ForAll(Watched):
    def _draft(self, requests: Any) -> None:
        original = self.mtp.forward
        self.mtp.forward = lambda depth, *rest: original(0, *rest)
        super()._draft(requests)
        self.mtp.forward = original


class NothingRecomputed(Watched):
    def _commit(self, *args: Any) -> Any:
        before = {id(request): request.state.length for request, _ in args[0] if request.drafts}
        events = super()._commit(*args)
        for request, _ in args[0]:
            request.state.mtp_length = before.get(id(request), request.state.mtp_length)
        return events


class OneEntryTooManyKept(Watched):
    def _commit(self, *args: Any) -> Any:
        before = {id(request): request.state.length for request, _ in args[0] if request.drafts}
        events = super()._commit(*args)
        for request, _ in args[0]:
            if id(request) in before:
                request.state.mtp_length = min(request.state.mtp_length + 1, before[id(request)])
        return events


class HiddenOffByOne(Watched):
    def _draft(self, requests: Any) -> None:
        for request in requests:
            request.state.hidden = request.state.hidden.roll(1, 0)
        super()._draft(requests)


class OnlyDepth0KeepsConvolutions(Watched):
    def _draft(self, requests: Any) -> None:
        original = self.mtp.forward

        def forward(depth: int, hidden: torch.Tensor, embedded: torch.Tensor, batch: Any) -> torch.Tensor:
            for ring in self.cache.layers[3 + depth].rings if depth else ():
                ring.zero_()
            return original(depth, hidden, embedded, batch)

        self.mtp.forward = forward
        super()._draft(requests)
        self.mtp.forward = original


class RawEmbedding(Watched):
    def _draft(self, requests: Any) -> None:
        original = self.model.embedding
        self.model.embedding = lambda ids: self.model.embed[ids]
        super()._draft(requests)
        self.model.embedding = original


class NoRoomInRings(Watched):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        short = [[ring[:, :3].clone() for ring in layer.rings] for layer in self.cache.layers]
        pairs = zip(self.cache.layers, short, strict=True)
        self.cache.layers = [LayerState(layer.k_pages, layer.v_pages, *rings) for layer, rings in pairs]
        self.cache.ring = 3


class CommitOneTooFew(Watched):
    def _commit(self, *args: Any) -> Any:
        advance, verifying = self.cache.advance, {id(request.state) for request, _ in args[0] if request.drafts}
        self.cache.advance = lambda seq, n: advance(seq, n - (id(seq) in verifying and n > 1))
        events = super()._commit(*args)
        self.cache.advance = advance
        return events


def replace_verify(accept: Any) -> type[Watched]:
    """An engine whose verification takes `accept(drafts, best tokens)` drafts."""

    class Copy(Watched):
        def _commit(self, *args: Any) -> Any:
            def verify(drafts: list[int], logits: torch.Tensor, *_: Any) -> list[int]:
                best = logits.argmax(-1).tolist()
                count = accept(drafts, best)
                return [*drafts[:count], best[count]]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_module, "verify", verify)
                return super()._commit(*args)

    return Copy


def agreed(drafts: list[int], best: list[int]) -> int:
    return next((i for i in range(len(drafts)) if drafts[i] != best[i]), len(drafts))


class LastPageShared(Watched):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache._copy_last_page = lambda seq: None


class FollowersIgnored(Watched):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache._prefixes.follow = 0


class PagesGivenUpTooEarly(Watched):
    def _draft(self, requests: Any) -> None:
        for request in requests:
            self.cache.retire(request.state)
        super()._draft(requests)


class StaleHiddenOfPrefix(Watched):
    def _admit(self) -> None:
        waiting = list(self._waiting)
        super()._admit()
        for request in waiting:
            if request.seq is not None and request.seq.hidden is not None:
                request.seq.hidden = request.seq.hidden.roll(1, 0)


SCRIPTED = {
    "depth 0 for all": Depth0ForAll,
    "nothing recomputed": NothingRecomputed,
    "one entry too many kept": OneEntryTooManyKept,
    "hidden states off by one": HiddenOffByOne,
    "only depth 0 keeps convolutions": OnlyDepth0KeepsConvolutions,
    "raw embedding": RawEmbedding,
    "no room for drafts in the rings": NoRoomInRings,
    "commit one too few": CommitOneTooFew,
    "all drafts accepted": replace_verify(lambda drafts, best: len(drafts)),
    "one draft too many accepted": replace_verify(lambda drafts, best: min(agreed(drafts, best) + 1, len(drafts))),
}
BRANCHING = {
    "last page shared": LastPageShared,
    "following tokens ignored": FollowersIgnored,
    "pages given up too early": PagesGivenUpTooEarly,
    "hidden states of a prefix off by one": StaleHiddenOfPrefix,
}


def test_broken_copies_are_caught(tuned):
    missed = []
    for name, kind in (SCRIPTED | BRANCHING).items():
        watched, right = scripted(tuned, kind, new=30) if name in SCRIPTED else (branching(tuned, kind), True)
        error = max(errors(tuned.dense, watched)) / TOLERANCE
        print(f"{name}: text {'unchanged' if right else 'wrong'}, logits off by {error:.3g} times the tolerance")
        if right and error < 100:
            missed.append(name)
    print(f"{len(SCRIPTED | BRANCHING) - len(missed)} of {len(SCRIPTED | BRANCHING)} broken copies caught")
    assert not missed
