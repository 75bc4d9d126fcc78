"""Stop strings that end inside, across and between blocks of accepted tokens: cases T13 and T14."""

from __future__ import annotations

from itertools import pairwise

import pytest

from driving import assert_idle, speculate
from sparsespec import LLM, CompletionOutput, SamplingParams
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import scripted

pytestmark = pytest.mark.usefixtures("one_thread")

K = 15  # blocks of 16 tokens
TEXT = (" Numbers rise and fall while the patient clerk writes them down in a long green book, and nobody reads the book except"
        " one old cat. It has seen many clerks, many books and a great number of mice who came to eat the paper at night.")


def stops_of(text: str, places: list[int]) -> list[list[str]]:
    """At each of these characters: a stop string of one letter, of a few, of many; and two that overlap."""
    out = []
    for at in places:
        out += [[text[at:at + 1]], [text[at:at + 7]], [text[at:at + 30]], [text[at:at + 12], text[at + 3:at + 9]]]
    return out


def expected(ids: list[int], stops: list[str], smol: LoadedModel, include: bool) -> tuple[str, str, int]:
    """(text, stop, tokens) when text is read one character at a time: the match that ends first, then the longest."""
    decode = lambda n: smol.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)  # noqa: E731
    text = decode(len(ids))
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            count = next(n for n in range(1, len(ids) + 1) if len(decode(n)) >= end)
            return text[:end if include else end - len(stop)], stop, count
    raise AssertionError("no stop string in the text")


def build(smol: LoadedModel, ids: list[int], prompt: list[int], k: int) -> LLM:
    table = [0] * len(prompt) + ids
    return LLM(scripted(table, smol.config.vocab_size, tokenizer=smol.tokenizer), kv_cache_tokens=1024, max_model_len=256,
               max_num_seqs=4, speculative_config=speculate(k))


def stream(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    """The last output of a stream; none before it may have said more than it, or taken anything back."""
    texts, last = [], None
    for output in llm.stream(prompt, params):
        last = output.outputs[0]
        texts.append(last.text)
    assert last is not None
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    return last


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("include", [False, True])
def test_t13_t14_text_and_ids_end_at_the_stop_string(k: int, include: bool, smol: LoadedModel) -> None:
    """Stop strings at every place of three blocks, whole and streamed, with the ids and logprobs that belong to the text."""
    ids = smol.tokenizer(TEXT)["input_ids"]
    assert smol.tokenizer.decode(ids) == TEXT
    prompt = smol.tokenizer("The story:")["input_ids"]
    llm = build(smol, ids, prompt, k)
    seen_blocks = set()
    for stops in stops_of(TEXT, list(range(2, 180, 17 if include else 8))):
        text, stop, count = expected(ids, stops, smol, include)
        seen_blocks.add((count - 1) % (K + 1))
        params = SamplingParams(temperature=0, max_tokens=100, stop=stops, logprobs=2, include_stop_str_in_output=include)
        for c in (llm.generate([prompt], params, use_tqdm=False)[0].outputs[0], stream(llm, prompt, params)):
            assert c.text == text
            assert (c.finish_reason, c.stop_reason) == ("stop", stop)
            assert c.token_ids == ids[:count]
            assert c.logprobs is not None
            assert len(c.logprobs) == count
            assert all(t in row for t, row in zip(c.token_ids, c.logprobs, strict=True))
    assert_idle(llm)
    assert k == 0 or (len(seen_blocks) > 8 and llm.stats()["num_accepted_tokens"] > 300)


def test_t13_a_stop_string_of_two_tokens_at_each_place_of_a_block(smol: LoadedModel) -> None:
    """The same two tokens moved along, so that they are first in a block, last in it, and across two."""
    filler = smol.tokenizer(TEXT)["input_ids"]
    stop_ids = smol.tokenizer(" zebra crossing")["input_ids"]
    prompt = smol.tokenizer("The story:")["input_ids"]
    for offset in range(1, 2 * K + 3):
        ids = filler[:offset] + stop_ids + filler[offset:]
        llm = build(smol, ids, prompt, K)
        params = SamplingParams(temperature=0, max_tokens=60, stop=["ebra cross", " zebra crossing", "never there"])
        c = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        assert c.text == smol.tokenizer.decode(filler[:offset]) + " z"
        assert (c.stop_reason, c.token_ids) == ("ebra cross", ids[:offset + len(stop_ids)])


def test_t13_what_only_looks_like_a_stop_string_is_not_lost(smol: LoadedModel) -> None:
    """Text held back as the possible beginning of a stop string comes out when it was none, at the end as well."""
    ids = smol.tokenizer(TEXT)["input_ids"][:40]
    text = smol.tokenizer.decode(ids)
    prompt = smol.tokenizer("The story:")["input_ids"]
    llm = build(smol, [*ids, 0], prompt, K)
    params = SamplingParams(temperature=0, max_tokens=40, stop=[text[-5:] + " and more", text[40:60] + "#", "clerk!"])
    for c in (llm.generate([prompt], params, use_tqdm=False)[0].outputs[0], stream(llm, prompt, params)):
        assert (c.text, c.finish_reason, c.stop_reason) == (text, "length", None)
        assert c.token_ids == ids


def test_t13_stops_are_each_requests_own(smol: LoadedModel) -> None:
    ids = smol.tokenizer(TEXT)["input_ids"]
    prompt = smol.tokenizer("The story:")["input_ids"]
    llm = build(smol, ids, prompt, K)
    stops: list[list[str] | None] = [["clerk"], None, ["book", "cat"], ["mice"]]
    out = llm.generate([prompt] * 4, [SamplingParams(temperature=0, max_tokens=30, stop=s) for s in stops], use_tqdm=False)
    for o, stop in zip(out, stops, strict=True):
        whole = smol.tokenizer.decode(ids[:30])
        hits = [whole.index(s) for s in stop or [] if s in whole]
        assert o.outputs[0].text == (whole[:min(hits)] if hits else whole)
