"""The contract of codecs, one check per sentence.

Shape legend: P = elements of the vector; B = bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Codec, Coded
from geo_ray.codecs.feedback import Encoder
from geo_ray.testing.checks import Checks, check_options, expect

_SIZES: Final = (0, 1, 2, 3, 7, 15, 16, 17, 255, 257, 4095, 4096, 4097, 65535, 65537, 150_001)
_SMALL: Final = (0, 1, 3, 17, 130)
_ROUNDING: Final = 1e-6
_MANY: Final = 10**6
_ROOM_BYTES: Final = 2200  # a header, and a padded block or chunk
_ESTIMATE: Final = 0.1  # tolerance of bits_per_value


def gauss(num: int, seed: int = 0) -> Tensor:
    """Normal values (P,)."""
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def heavy(num: int) -> Tensor:
    """A vector (P,) with mostly tiny elements; a third is zero."""
    x_P = gauss(num) ** 5
    x_P[::3] = 0.0
    return x_P


def _same_bits(a_P: Tensor, b_P: Tensor) -> bool:
    return torch.equal(a_P.view(torch.int32), b_P.view(torch.int32))


def _is_unbiased(codec: Codec) -> bool:
    """Return whether a codec is unbiased; its result may be larger, but its mean is right."""
    return codec.traits.feeds_back


def what_comes_back_is_no_worse_than_nothing(codec: Codec) -> None:
    """The error is at most the vector's norm, for vectors of any length, as fp32 on the CPU."""
    for make in (gauss, heavy):
        for num in _SIZES:
            x_P = make(num)
            coded = codec.encode(x_P, {}, 7)
            expect(coded.kind == codec.kind, f"it writes the kind {coded.kind!r} of another codec")
            expect(coded.num == num, f"it writes {coded.num} elements for {num}")
            out_P = codec.decode(coded)
            expect(
                out_P.dtype == torch.float32 and out_P.shape == (num,) and out_P.is_cpu,
                f"decode gives {out_P.dtype} {tuple(out_P.shape)} on {out_P.device}",
            )
            expect(bool(out_P.isfinite().all()), "the decoded values are not finite")
            lost, had = float((out_P - x_P).norm()), float(x_P.norm())
            near = lost <= had * (1 + _ROUNDING)
            expect(near or _is_unbiased(codec), f"the error of {num} values exceeds their norm")


def zeros_stay_zeros(codec: Codec) -> None:
    """Zeros decode to zeros."""
    for num in _SIZES:
        out_P = codec.decode(codec.encode(torch.zeros(num), {}, 1))
        expect(not out_P.any(), f"{num} zeros decode to other values")


def lossless_means_every_bit(codec: Codec) -> None:
    """A lossless codec restores every bit, also of negative zeros and subnormal numbers."""
    if codec.traits.lossy:
        return
    odd_P = torch.tensor([-0.0, 0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.5, 65520.0, 0.1])
    vectors = [torch.cat([gauss(1001), odd_P.repeat(3), torch.zeros(77)])]
    for fraction in (0.0, 0.001, 0.05, 0.5, 1.0):
        there_P = torch.rand(9001, generator=torch.Generator().manual_seed(3)) < fraction
        vectors.append(gauss(9001) * there_P)
    for x_P in vectors:
        same = _same_bits(codec.decode(codec.encode(x_P, {}, 1)), x_P)
        expect(same, "its traits state that it is lossless, but other bits are decoded")


def extreme_values_stay_finite(codec: Codec) -> None:
    """Decoded values are finite, from the smallest to the largest numbers."""
    for scale in (3e38, 1e30, 1e-30, 1e-38, 1e-44):
        for num in (1, 5, 300, 5000):
            x_P = gauss(num).clamp(-1, 1) * scale
            out_P = codec.decode(codec.encode(x_P, {}, 1)).double()
            finite = bool(out_P.isfinite().all())
            expect(
                finite or _is_unbiased(codec),
                f"values of about {scale:g} decode to non-finite values",
            )


def the_same_input_gives_the_same_bytes(codec: Codec) -> None:
    """The bytes depend only on vector, memory and seed."""
    memories: list[dict[str, Tensor]] = [{}, {}]
    for step in range(3):
        x_P, found = gauss(5003, step), []
        for number, memory in enumerate(memories):
            torch.manual_seed(number)  # of no consequence
            before = torch.get_rng_state()
            found.append(codec.encode(x_P, memory, step))
            moved = not torch.equal(torch.get_rng_state(), before)
            expect(not moved, "the global random state changed")
        expect(torch.equal(found[0].data_B, found[1].data_B), "the bytes differ from call to call")
        expect(memories[0].keys() == memories[1].keys(), "the memory differs from call to call")
        once_P, twice_P = codec.decode(found[0]), codec.decode(found[0])
        expect(_same_bits(once_P, twice_P), "decode gives different bits from call to call")


def a_saved_memory_goes_on(codec: Codec) -> None:
    """A restored memory continues with the same bytes."""
    memory: dict[str, Tensor] = {}
    other: dict[str, Tensor] = {}
    for step in range(3):
        codec.encode(gauss(4321, step), memory, step)
    again = {name: value.clone() for name, value in memory.items()}
    codec.encode(gauss(4321, 77), other, 77)  # of another stream
    for step in range(3, 6):
        x_P = gauss(4321, step)
        same = torch.equal(
            codec.encode(x_P, memory, step).data_B, codec.encode(x_P, again, step).data_B
        )
        expect(same, "after a checkpoint the bytes differ: it has state outside of its memory")


def inputs_and_results_are_apart(codec: Codec) -> None:
    """The vector is unchanged, and nothing shares memory with it."""
    memory: dict[str, Tensor] = {}
    x_P = heavy(70_001)
    before_P = x_P.clone()
    for _ in range(3):
        coded = codec.encode(x_P, memory, 1)
        expect(torch.equal(x_P, before_P), "encode changes the vector")
    places = {value.untyped_storage().data_ptr() for value in memory.values()}
    expect(x_P.untyped_storage().data_ptr() not in places, "the memory holds the vector itself")
    out_P, data_B = codec.decode(coded), coded.data_B.clone()
    expected_P = out_P.clone()
    x_P.zero_()
    expect(torch.equal(coded.data_B, data_B), "the bytes change with the vector")
    coded.data_B.zero_()
    expect(torch.equal(out_P, expected_P), "the decoded values change with the bytes")


def bytes_may_lie_anywhere(codec: Codec) -> None:
    """Bytes may start at any offset of a buffer, and a vector may have any stride."""
    wide = gauss(20_000)
    strided_P = wide[::3]
    expected = codec.encode(strided_P.clone(), {}, 1).data_B
    expect(
        torch.equal(codec.encode(strided_P, {}, 1).data_B, expected)
        and torch.equal(codec.encode(strided_P.clone().requires_grad_(), {}, 1).data_B, expected),
        "the bytes depend on the memory layout of the vector",
    )
    for num in (0, 1, 4097):
        coded = codec.encode(gauss(num), {}, 1)
        wanted_P = codec.decode(coded)
        for offset in (1, 2, 3, 5):
            buffer_B = torch.zeros(coded.data_B.numel() + offset, dtype=torch.uint8)
            buffer_B[offset:] = coded.data_B
            found_P = codec.decode(replace(coded, data_B=buffer_B[offset:]))
            expect(
                _same_bits(found_P, wanted_P),
                f"at offset {offset} the bytes decode to other values",
            )


def bytes_are_a_row_and_few(codec: Codec) -> None:
    """Bytes are a uint8 row on the CPU, as many as stated, and at most as without a codec."""
    for num in (*_SIZES, _MANY):
        coded = codec.encode(gauss(num), {}, 1)
        data_B = coded.data_B
        expect(
            data_B.dtype == torch.uint8
            and data_B.dim() == 1
            and data_B.is_cpu
            and data_B.is_contiguous(),
            "the bytes are not a row of uint8 on the CPU",
        )
        most = 4 * num + 4 * num // 16 + _ROOM_BYTES
        expect(coded.size_bytes <= most, f"{num} values take more bytes than without a codec")
    stated, found = codec.traits.bits_per_value, 8 * coded.size_bytes / num
    expect(
        abs(found - stated) <= _ESTIMATE * found,
        f"a value takes {found:.4g} bits; its traits state {stated:.4g}",
    )


def nothing_is_lost_in_the_books(codec: Codec) -> None:
    """The input is the sum of the decoded values and the residual."""
    if codec.traits.feeds_back:
        return
    encoder, handed_P, decoded_P = Encoder(codec, "check"), torch.zeros(5003), torch.zeros(5003)
    for number in range(8):
        x_P = gauss(5003, number)
        handed_P += x_P
        decoded_P += encoder.encode(x_P, number).sent_P
    if encoder.residual_P is not None:
        decoded_P += encoder.residual_P
    gap = float((handed_P - decoded_P).norm() / handed_P.norm())
    expect(gap <= 1e-4, f"with error feedback {gap:.2g} of the sum is lost")


def _decode_or_refuse(codec: Codec, coded: Coded) -> None:
    """Decoding either raises FrameError or returns a vector of the declared size."""
    try:
        out_P = codec.decode(coded)
    except FrameError:
        return
    has_declared_shape = out_P.dtype == torch.float32 and out_P.shape == (coded.num,)
    expect(has_declared_shape, f"bytes for {coded.num} values become {tuple(out_P.shape)}")


def _must_refuse(codec: Codec, coded: Coded, what: str) -> None:
    try:
        codec.decode(coded)
    except FrameError:
        return
    expect(False, f"{what} are not rejected with FrameError")


def wrong_bytes_are_refused(codec: Codec) -> None:
    """Truncated, longer or non-row bytes, and impossible numbers of values, are rejected."""
    for num in _SMALL:
        coded = codec.encode(heavy(num), {}, 1)
        for length in range(coded.data_B.numel()):
            short = replace(coded, data_B=coded.data_B[:length])
            _must_refuse(codec, short, f"{length} of {coded.data_B.numel()} bytes")
        for more in (1, 4, 1000):
            long_B = torch.cat([coded.data_B, torch.zeros(more, dtype=torch.uint8)])
            _must_refuse(codec, replace(coded, data_B=long_B), f"{more} bytes too many")
    coded = codec.encode(heavy(64), {}, 1)
    for data in (coded.data_B.to(torch.int16), coded.data_B.view(1, -1)):
        _must_refuse(codec, replace(coded, data_B=data), "data that are not a row of bytes")
    for num in (-1, 2**31):
        _must_refuse(codec, replace(coded, num=num), f"{num} values")


def damaged_bytes_do_no_harm(codec: Codec) -> None:
    """Flipped bits, noise or another size are rejected, or give a vector of that size."""
    for num in (1, 130):
        coded = codec.encode(heavy(num), {}, 1)
        end, head = coded.data_B.numel(), min(coded.data_B.numel(), 40)
        flips = [(place, bit) for place in range(head) for bit in range(8)]
        flips += [(place, place % 7) for place in range(head, end, max(end // 97, 1))]
        for place, bit in flips:
            flipped_B = coded.data_B.clone()
            flipped_B[place] ^= 1 << bit
            _decode_or_refuse(codec, replace(coded, data_B=flipped_B))
    generator = torch.Generator().manual_seed(11)
    for size in (0, 1, 8, 16, 24, 40, 64, 200, 5000):
        for num in (0, 1, 2, 50, 4097):
            noise_B = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
            _decode_or_refuse(codec, Coded(codec.kind, num, noise_B))
    coded = codec.encode(heavy(5000), {}, 1)
    for num in (0, 1, 4096, 4999, 5001, 8192, 9000):
        _decode_or_refuse(codec, replace(coded, num=num))


CHECKS: Final[Checks[Codec]] = {
    "its options are frozen and strict": check_options,
    "the decoded vector is no worse than zero": what_comes_back_is_no_worse_than_nothing,
    "zeros stay zeros": zeros_stay_zeros,
    "a lossless codec restores every bit": lossless_means_every_bit,
    "extreme values stay finite": extreme_values_stay_finite,
    "the same input gives the same bytes": the_same_input_gives_the_same_bytes,
    "a restored memory continues with the same bytes": a_saved_memory_goes_on,
    "inputs and results share no memory": inputs_and_results_are_apart,
    "bytes may have any alignment": bytes_may_lie_anywhere,
    "bytes are a row of the stated size": bytes_are_a_row_and_few,
    "residuals account for all losses": nothing_is_lost_in_the_books,
    "invalid bytes are rejected": wrong_bytes_are_refused,
    "damaged bytes do no harm": damaged_bytes_do_no_harm,
}
"""All contract checks of codecs."""
