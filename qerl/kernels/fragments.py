"""Gluon pieces that both W4A16 kernels share: words of codes to bf16, E5M3 bytes to bf16 pairs.

Torch twins: `layout.unpack_word`, `layout_nf4.unpack_word` and `layout.decode_e5m3`. One asm
statement works on one 32-bit word: with several bytes a statement the compiler may choose which
bytes share a register.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Gluon renamed two functions between triton 3.6 (first name) and 3.9.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
renamed = hasattr(tma, "async_load")
tma_load = tma.async_load if renamed else tma.async_copy_global_to_shared


@gluon.jit
def unpack(words, scales):
    """Eight bf16 w * s * 2^-8 in column order from a word and (s * 2^118) twice in a word."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a,b,c,d;
        and.b32 a, $8, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$0,$1}, a;
        shl.b32 a, $8, 6;
        and.b32 a, a, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$2,$3}, a;
        shf.l.wrap.b32 b, $8, $8, 10;
        and.b32 b, b, 0x81C081C0;
        mul.bf16x2 b, b, $9;
        mov.b32 {$4,$5}, b;
        shl.b32 c, $8, 4;
        and.b32 c, c, 0x81808180;
        shr.b32 d, $8, 4;
        lop3.b32 d, d, 0x00400040, c, 0xEA;
        mul.bf16x2 d, d, $9;
        mov.b32 {$6,$7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, scales],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def nf4_tables(any):
    """Four of the eight words of the levels' bytes (`layout_nf4.planes`), kept in registers.

    A PRMT takes one immediate; the other word of a table ptxas would move into a register again for
    each lookup, eight instructions a word. It does not know that bit 31 of the mask of the lanes
    before this one is 0.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 z;
        mov.u32 z, %lanemask_lt;
        shr.u32 z, z, 31;
        xor.b32 $0, z, 0xCA063280;
        xor.b32 $1, z, 0xAD7C25A3;
        xor.b32 $2, z, 0xBEBFBFBF;
        xor.b32 $3, z, 0x3E3E3E3D;
        }""",
        "=r,=r,=r,=r,r",
        [any],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_nf4(words, tables):
    """Eight bf16 NF4 levels in column order from a word of plain nibbles. No scale."""
    low0, low2, high0, high2 = tables
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s,u,m,n,p,l,h,t;
        and.b32 s, $8, 0x77777777;
        shl.b32 u, $8, 4;
        prmt.b32 m, u, $8, 0xD9C8;
        prmt.b32 n, $9, 0x00BA3D92, s;
        prmt.b32 p, $10, 0x803910E2, s;
        lop3.b32 l, p, n, m, 0xE4;
        prmt.b32 n, $11, 0x00BDBEBE, s;
        prmt.b32 p, $12, 0x3F3F3F3E, s;
        lop3.b32 h, p, n, m, 0xE4;
        prmt.b32 t, l, h, 0x5140;
        mov.b32 {$0,$1}, t;
        prmt.b32 t, l, h, 0x7362;
        mov.b32 {$2,$3}, t;
        shr.b32 s, s, 16;
        prmt.b32 m, u, $8, 0xFBEA;
        prmt.b32 n, $9, 0x00BA3D92, s;
        prmt.b32 p, $10, 0x803910E2, s;
        lop3.b32 l, p, n, m, 0xE4;
        prmt.b32 n, $11, 0x00BDBEBE, s;
        prmt.b32 p, $12, 0x3F3F3F3E, s;
        lop3.b32 h, p, n, m, 0xE4;
        prmt.b32 t, l, h, 0x5140;
        mov.b32 {$4,$5}, t;
        prmt.b32 t, l, h, 0x7362;
        mov.b32 {$6,$7}, t;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
        [words, low0, low2, high0, high2],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def join8(a0, a1, a2, a3, a4, a5, a6, a7):
    """[..] x 8 -> [.., pair low bit, pair high bit, element] of columns 2 p + e."""
    even = gl.join(gl.join(a0, a4), gl.join(a2, a6))
    odd = gl.join(gl.join(a1, a5), gl.join(a3, a7))
    return gl.join(even, odd)


@gluon.jit
def lift_scales(word):
    """Four E5M3 bytes -> four words, each (v, v) with v the bf16 s * 2^118. Byte 2 k + h."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $4, 0, 0x4040; mad.lo.u32 $0, t, 16, 0x75807580;
        prmt.b32 t, $4, 0, 0x4141; mad.lo.u32 $1, t, 16, 0x75807580;
        prmt.b32 t, $4, 0, 0x4242; mad.lo.u32 $2, t, 16, 0x75807580;
        prmt.b32 t, $4, 0, 0x4343; mad.lo.u32 $3, t, 16, 0x75807580; }""",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def lift_low(word):
    """`lift_scales` of bytes 0 and 1: both rows of the first 64-block."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $2, 0, 0x4040; mad.lo.u32 $0, t, 16, 0x75807580;
        prmt.b32 t, $2, 0, 0x4141; mad.lo.u32 $1, t, 16, 0x75807580; }""",
        "=r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def lift_high(word):
    """`lift_scales` of bytes 2 and 3: both rows of the second 64-block."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $2, 0, 0x4242; mad.lo.u32 $0, t, 16, 0x75807580;
        prmt.b32 t, $2, 0, 0x4343; mad.lo.u32 $1, t, 16, 0x75807580; }""",
        "=r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def split_pair(word):
    """A 32-bit word as its two bf16 halves."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0,$1}, $2;",
        "=h,=h,r",
        [word],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
