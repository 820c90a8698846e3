"""E2M1, the 4-bit float of NVFP4 and MXFP4: 1 sign, 2 exponent and 1 mantissa bit.

Code = index into `E2M1_VALUES`; bit 3 is the sign. No infinity, no NaN; code 8 is minus zero.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)  # by code
E2M1_MAX = 6.0


def encode_e2m1(values: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """The nearest code of each fp32 value, ties to the even mantissa, saturating at ±6.

    Ties go .25→0, .75→1, 1.25→1, 1.75→2, 2.5→2, 3.5→4, 5→4. A negative value that rounds to zero
    takes code 8 and minus zero takes code 0, as in compressed-tensors 0.20.1. `values` is scratch:
    it is overwritten.
    """
    negative = values < 0
    magnitude = values.abs_().clamp_(max=E2M1_MAX)
    # Steps are 0.5 below 2, 1 in [2, 4] and 2 from 4 on. Each line counts codes as if its step ran
    # over the whole range; the right one is the smallest. `round` breaks ties to even, and a code
    # has an even mantissa exactly where its index is even.
    index = (magnitude * 2).round_()
    scratch = magnitude.round().add_(2)
    torch.minimum(index, scratch, out=index)
    torch.mul(magnitude, 0.5, out=scratch).round_().add_(4)
    torch.minimum(index, scratch, out=index)
    return index.to(torch.uint8) | (negative.to(torch.uint8) << 3)
