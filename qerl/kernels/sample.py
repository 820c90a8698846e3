"""One token a row from its logits, with log-probability, logsumexp and entropy, in one pass.

    u = splitmix64(seed; position) in [0, 1);  token = smallest id with cdf(id) > u * total

A sample depends on its sequence's seed and its position alone, never on the batch. A first kernel
reads the logits once and leaves, for each chunk of the vocabulary, maximum, sum of exponentials and
their first moment; a second, one program a row, picks the chunk and reads that one again.

Entropy H = logsumexp - E[logit], in nats. Log-probabilities are those of the whole distribution at
the given temperature: the value that the trainer computes.

Source: splitmix64, Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import pdl_options, runs_kernels

CHUNK = 4096  # logits a program of the first kernel reads


@dataclass(frozen=True, slots=True)
class Draws:
    """What sampling leaves for each of B rows."""

    tokens: Int[Tensor, " B"]
    """int64."""

    logprobs: Float[Tensor, " B"]
    """fp32 nats, of the token."""

    logsumexp: Float[Tensor, " B"]
    """fp32 nats, of logits / temperature."""

    entropy: Float[Tensor, " B"]
    """fp32 nats."""

    scratch: Float[Tensor, "B C 4"]
    """fp32: chunk statistics."""

    @staticmethod
    def allocate(rows: int, vocabulary: int, device: torch.device | str = "cuda") -> "Draws":
        """Buffers for `rows` rows of `vocabulary` logits."""
        chunks = -(-vocabulary // CHUNK)
        fp32 = [torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3)]
        scratch = torch.empty(rows, chunks, 4, dtype=torch.float32, device=device)
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        return Draws(tokens, fp32[0], fp32[1], fp32[2], scratch)


def uniforms_reference(
    seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Output `positions` of splitmix64(seeds) as fp64 in [0, 1), 53 bits."""

    def shift(z: Tensor, bits: int) -> Tensor:  # logical: torch's shift copies the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = seeds + (positions + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    z = z ^ shift(z, 31)
    return shift(z, 11).double() * 2.0**-53


def sample_reference(
    logits: Float[Tensor, "B V"],
    seeds: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification in fp64: tokens, logprobs, logsumexp, entropy. Temperature 0 is greedy."""
    x = logits.double() / (temperature or 1.0)
    lse = torch.logsumexp(x, 1)
    p = (x - lse[:, None]).exp()
    cdf = p.cumsum(1)
    target = uniforms_reference(seeds, positions) * cdf[:, -1]
    tokens = (cdf <= target[:, None]).sum(1).clamp(max=x.shape[1] - 1)
    tokens = tokens if temperature else x.argmax(1)
    logprobs = x.gather(1, tokens[:, None])[:, 0] - lse
    entropy = lse - torch.where(p > 0, p * x, 0.0).sum(1)
    return tokens, logprobs.float(), lse.float(), entropy.float()


@triton.jit
def _chunk_kernel(
    logits_ptr, scratch_ptr, V, stride, INVERSE, CHUNKS, B: tl.constexpr, PDL: tl.constexpr
):
    """Scratch [row, chunk] = maximum, sum exp(x - max), sum exp(x - max) x, id of the maximum."""
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    col = chunk * B + tl.arange(0, B)
    at = logits_ptr + row.to(tl.int64) * stride + col
    x = tl.load(at, mask=col < V, other=float("-inf")).to(tl.float32) * INVERSE
    top, where = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    p = tl.exp(x - tl.where(top > float("-inf"), top, 0.0))  # a chunk may be masked whole
    moment = tl.where(p > 0, p * x, 0.0)
    to = scratch_ptr + (row * CHUNKS + chunk) * 4
    tl.store(to, top)
    tl.store(to + 1, tl.sum(p, 0))
    tl.store(to + 2, tl.sum(moment, 0))
    tl.store(to + 3, (where + chunk * B).to(tl.float32))  # below 2^24: exact


@triton.jit
def _uniform(seed, position):
    """Output `position` of splitmix64(seed), fp64 in [0, 1)."""
    z = seed.to(tl.uint64) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pick_kernel(  # noqa: PLR0913
    logits_ptr,
    scratch_ptr,
    seed_ptr,
    position_ptr,
    token_ptr,
    logprob_ptr,
    lse_ptr,
    entropy_ptr,
    V,
    stride,
    INVERSE,
    CHUNKS,
    GREEDY: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    row = tl.program_id(0)
    c = tl.arange(0, C)
    at = scratch_ptr + (row * CHUNKS + c) * 4
    ok = c < CHUNKS
    tops = tl.load(at, mask=ok, other=float("-inf"))
    top = tl.max(tops, 0)
    lift = tl.exp(tops - top)
    sums = tl.load(at + 1, mask=ok, other=0.0) * lift
    moments = tl.load(at + 2, mask=ok, other=0.0) * lift
    total = tl.sum(sums, 0)
    lse = top + tl.log(total)
    if GREEDY:
        ids = tl.load(at + 3, mask=ok, other=0.0)
        # No top equals another where all are NaN: stay inside, the log-probability is NaN.
        token = tl.minimum(tl.min(tl.where((tops == top) & ok, ids, 1e9), 0).to(tl.int32), V - 1)
    else:
        cdf = tl.cumsum(sums.to(tl.float64), 0)
        all_mass = tl.sum(tl.where(c == CHUNKS - 1, cdf, 0.0), 0)
        target = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * all_mass
        chunk = tl.minimum(tl.sum(((cdf <= target) & ok).to(tl.int32), 0), CHUNKS - 1)
        before = tl.sum(tl.where(c == chunk - 1, cdf, 0.0), 0)
        i = tl.arange(0, B)
        col = chunk * B + i
        from_ptr = logits_ptr + row.to(tl.int64) * stride + col
        x = tl.load(from_ptr, mask=col < V, other=float("-inf")).to(tl.float32) * INVERSE
        p = tl.exp(x - top)
        inner = before + tl.cumsum(p.to(tl.float64), 0)
        within = tl.sum((inner <= target).to(tl.int32), 0)
        # The chunk's fp32 sum may exceed that of its members by a rounding: the last member with
        # any weight takes what lies between.
        last = tl.max(tl.where(p > 0, i, 0), 0)
        token = chunk * B + tl.minimum(within, last)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride + token).to(tl.float32) * INVERSE
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, lse - tl.sum(moments, 0) / total)


def sample(
    logits: Float[Tensor, "B V"],
    seeds: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    temperature: float,
    out: Draws,
    *,
    pdl: int = 1,
) -> Draws:
    """Draw a token for each row into `out`.

    Args:
        logits: fp32 or bf16, last axis contiguous; read once, plus one chunk a row.
        seeds: int64, one a sequence.
        positions: int64, the index of the token within its sequence: the counter.
        temperature: divides the logits; 0 takes the most likely token (lowest id of equals), with
            the log-probability of temperature 1.
        out: buffers.
        pdl: programmatic dependent launch.
    """
    b, v = logits.shape
    chunks = out.scratch.shape[1]
    if chunks != -(-v // CHUNK) or out.tokens.shape[0] != b:
        raise ValueError(
            f"buffers for {out.tokens.shape[0]} rows, {chunks} chunks: logits {(b, v)}"
        )
    if not runs_kernels(logits):
        found = sample_reference(logits, seeds, positions, temperature)
        fields = (out.tokens, out.logprobs, out.logsumexp, out.entropy)
        for field, value in zip(fields, found, strict=True):
            field.copy_(value)
        return out
    inverse = 1.0 / (temperature or 1.0)
    options = pdl_options(pdl)
    _chunk_kernel[(chunks, b)](
        logits,
        out.scratch,
        v,
        logits.stride(0),
        inverse,
        chunks,
        B=CHUNK,
        PDL=pdl,
        num_warps=8,
        **options,
    )
    _pick_kernel[(b,)](
        logits,
        out.scratch,
        seeds,
        positions,
        out.tokens,
        out.logprobs,
        out.logsumexp,
        out.entropy,
        v,
        logits.stride(0),
        inverse,
        chunks,
        GREEDY=temperature == 0,
        B=CHUNK,
        C=triton.next_power_of_2(chunks),
        PDL=pdl,
        num_warps=8,
        **options,
    )
    return out
