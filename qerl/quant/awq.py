"""AWQ: scale the input channels that matter before rounding, and divide their inputs.

    y = (x / s) (W s)ᵀ,    s = mean|x|^alpha / sqrt(max · min of it),    alpha on a grid in [0, 1)

The alpha with the least output error sum (ΔW H ΔWᵀ), H = XᵀX, wins, and it has to beat s = 1 over
all rows, so that scales never raise the error. Source: AWQ (arXiv:2306.00978, section 3.2).

Departures: the error is that of each linear's own output, exact over all calibration tokens by way
of XᵀX, of an even sample of rows (the released code runs the whole attention or MLP on a sample of
tokens); and instead of its grid of clipping factors, block scales are searched with the mean square
of their inputs as importance, inside the search of alpha as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.quant.packed import CHUNK_WEIGHTS, PackedWeight
from qerl.quant.search import BlockScaled

FLOOR = 1e-4  # of the largest mean|x|: channels that are almost off are not scaled up without end


@dataclass(frozen=True, kw_only=True)
class AwqSettings:
    """How scales are searched."""

    grid: int = 20
    """Values of alpha: 0, 1 / grid, 2 / grid, ...; the released code's 20."""

    search: bool = True
    """Search block scales as well, weighted by the inputs' mean square."""

    rows: int = 512
    """Rows of a fused group, evenly spaced, that the search of alpha looks at."""

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise ValueError(f"awq grid={self.grid}: at least 1 value of alpha; the paper takes 20")
        if self.rows < 1:
            raise ValueError(f"awq rows={self.rows}: at least 1 row to compare errors on")


def channel_scale(
    weights: Sequence[Float[Tensor, "_ K"]],
    mean_abs: Float[Tensor, " K"],
    second_moment: Float[Tensor, "K K"],
    format: BlockScaled,
    settings: AwqSettings,
) -> Float[Tensor, " K"]:
    """The s of one fused group: what W is multiplied by and x divided by, fp32.

    Channels with the same `mean_abs` get the same scale.
    """
    every = -(-sum(len(weight) for weight in weights) // settings.rows)
    sample = [weight[::every] for weight in weights]
    one = torch.ones_like(mean_abs)

    def error(of: Sequence[Tensor], scale: Tensor) -> float:
        scaled = [weight.detach().float() * scale for weight in of]
        importance = second_moment.diagonal() / scale.square()
        packed = format.quantize_scaled(scaled, search=settings.search, importance=importance)
        pairs = zip(of, packed, strict=True)
        return sum(output_error(weight, p, second_moment, scale) for weight, p in pairs)

    candidates = [one, *(_candidate(mean_abs, i / settings.grid) for i in range(1, settings.grid))]
    best = min(candidates, key=lambda scale: error(sample, scale))
    return min((one, best), key=lambda scale: error(weights, scale))


def pack_for_inputs(
    weights: Sequence[Float[Tensor, "_ K"]],
    second_moment: Float[Tensor, "K K"],
    format: BlockScaled,
    settings: AwqSettings,
) -> list[PackedWeight]:
    """Pack each weight under the block scales that leave the least output error.

    Args:
        weights: of one fused group; where they carry s, `second_moment` is that of x / s.
        second_moment: XᵀX of their inputs.
        format: what the bytes are.
        settings: of the search.
    """
    options = [format.quantize_scaled(weights, search=False)]
    if settings.search:  # the diagonal alone may mislead, so the searched scales have to win
        importance = second_moment.diagonal()
        options.append(format.quantize_scaled(weights, search=True, importance=importance))
        options.append(format.quantize_scaled(weights, search=True))
    return [
        min(packed, key=lambda one: output_error(weight, one, second_moment))
        for weight, packed in zip(weights, zip(*options, strict=True), strict=True)
    ]


def output_error(
    weight: Float[Tensor, "N K"],
    packed: PackedWeight,
    second_moment: Float[Tensor, "K K"],
    scale: Float[Tensor, " K"] | None = None,
) -> float:
    """Squared error of the outputs, sum over rows of Δw H Δwᵀ with Δw = w' / s - w.

    With H = XᵀX / tokens it is the mean over tokens of |x W'ᵀ - x Wᵀ|². fp32.
    """
    difference = packed.dequantize(torch.float32)  # [N, K]
    if scale is not None:
        difference.div_(scale)
    difference.sub_(weight.detach().float())
    return output_energy(difference, second_moment)


def output_energy(weight: Float[Tensor, "N K"], second_moment: Float[Tensor, "K K"]) -> float:
    """Sum over rows of w H wᵀ: with H = XᵀX / tokens, the mean over tokens of |x Wᵀ|²."""
    rows = max(1, 16 * CHUNK_WEIGHTS.get(weight.device.type, 1 << 18) // weight.shape[1])
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for part in weight.float().split(rows):
        total += torch.linalg.vecdot(part @ second_moment, part).double().sum()
    return max(0.0, float(total))  # rounding may leave it below 0


def _candidate(mean_abs: Float[Tensor, " K"], alpha: float) -> Float[Tensor, " K"]:
    """mean|x|^alpha, normalised; 1 where no input is ever on."""
    largest = mean_abs.max()
    if alpha == 0 or not largest > 0:
        return torch.ones_like(mean_abs)
    power = mean_abs.clamp(min=FLOOR * float(largest)).pow(alpha)  # [K]
    return power / (power.max() * power.min()).sqrt()
