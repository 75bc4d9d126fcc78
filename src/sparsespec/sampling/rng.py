"""Counter-based random numbers: a pure function of (seed, counter, nonce, stream), the same on every device.

No state is kept, so a number can be asked for again, in any batch and in any order. The bits are 64-bit integer
arithmetic with wrap-around (the SplitMix64 finaliser), identical on CPU and CUDA; logarithms may differ in the last bit.

What keys what, and why:
- All streams but COUPLED take a nonce, which must differ between rounds of one request (the position of the
  round's first row does). Under rejection sampling, what a round may attend to depends on drafts that earlier rounds
  rejected; numbers that were looked at there must not come back at the same position.
- COUPLED takes none: a request with a seed of its own emits argmax(log p + g(seed, position)), whatever was drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

TARGET, DRAFT, ACCEPT, RESIDUAL, COUPLED, PROPOSE, CHECK, CHECK_RESIDUAL = range(1, 9)
"""Streams. TARGET: the token after the last draft. RESIDUAL: the token in a rejected draft's place. PROPOSE: what a cheap
proposer draws; CHECK and CHECK_RESIDUAL accept and replace it in the sparse pass, whose own token is DRAFT."""

_WORD = 2**64


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


_GOLDEN_U, _MUL1_U, _MUL2_U = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _MUL1, _MUL2 = _signed(_GOLDEN_U), _signed(_MUL1_U), _signed(_MUL2_U)
_POSITIVE = 2**63 - 1
_WEIGHT_SCALE = 2.0**61  # a row of probabilities then sums to about 2**61: far from overflow
SMALLEST_WEIGHT = 2.0**-61
"""Smaller ones count as 0 in `inverse_cdf`."""


def _fold_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift: torch shifts int64 arithmetically, so the copied sign bits are masked off."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: a bijection of int64 in which each input bit moves half of the output bits."""
    return _fold_(_fold_(_fold_(x, 30).mul_(_MUL1), 27).mul_(_MUL2), 31)


def _keys(seeds: Tensor, counters: Tensor, nonce: Tensor | int, stream: int) -> Tensor:
    """One well-mixed int64 a row [N]: each field is absorbed by a round of its own, so none can cancel another."""
    key = _mix_(seeds + _signed(_GOLDEN_U * stream))
    key = _mix_(key + counters * _GOLDEN + _MUL2)
    extra = _signed(nonce * _GOLDEN_U) if isinstance(nonce, int) else nonce * _GOLDEN
    return _mix_(key + extra + _MUL1)


def request_seed(engine_seed: int, request_counter: int) -> int:
    """A seed in [-2**63, 2**63) for a request that has none: distinct for distinct counters of one engine."""
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * _MUL1_U % _WORD
        x = (x ^ (x >> 27)) * _MUL2_U % _WORD
        return x ^ (x >> 31)
    return _signed(mix((mix((engine_seed + _GOLDEN_U) % _WORD) + request_counter * _GOLDEN_U) % _WORD))


def uniform(seeds: Tensor, counters: Tensor, nonce: Tensor | int, stream: int) -> Tensor:
    """float64 [N] strictly inside (0, 1), on a grid of 2**-52, for int64 seeds [N], counters [N] and nonce [N] or one int."""
    bits = (_keys(seeds, counters, nonce, stream) >> 12).bitwise_and_(2**52 - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def exponential(seeds: Tensor, counters: Tensor, vocab_size: int, stream: int) -> Tensor:
    """Unit exponential variables, float32 [N, V], strictly positive; small ones, which decide a race, keep full precision."""
    steps = torch.arange(1, vocab_size + 1, device=seeds.device, dtype=torch.int64).mul_(_GOLDEN)
    bits = _mix_(_keys(seeds, counters, 0, stream)[:, None] + steps)
    tail = bits.bitwise_and_(_POSITIVE).to(torch.float32).mul_(2.0**-63)
    return tail.clamp_(2.0**-64, 1 - 2.0**-24).neg_().log1p_().neg_()


def gumbel(seeds: Tensor, counters: Tensor, vocab_size: int, stream: int) -> Tensor:
    """Standard Gumbel variables, float32 [N, V]: -log of `exponential` with the same arguments."""
    return exponential(seeds, counters, vocab_size, stream).log_().neg_()


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one index a row, int64 [N], from weights probs [N, V], at least 0 with a sum of about 1 or less; u [N] in (0, 1).

    The cumulative sum is over integers (probability * 2**61, exact for float32 above 2**-38), so that it has no rounding,
    is the same on every device, and a weight of zero is never drawn. A row of weights below SMALLEST_WEIGHT gives 0.
    """
    cdf = (probs.to(torch.float32) * _WEIGHT_SCALE).to(torch.int64).cumsum_(-1)
    total = cdf[:, -1]
    aim = (u.to(torch.float64) * total.to(torch.float64)).to(torch.int64)
    aim = torch.minimum(aim, total - 1).unsqueeze(-1)  # u * total may round up to the total itself
    return torch.searchsorted(cdf, aim, right=True).squeeze(-1)
