"""Meters see what they measure."""

import math
import time

import numpy as np
import pytest
import torch

from qerl.record.meter import Stopwatch, host_peak_bytes, memory_use, reset_peak, tok_per_s

MIB = 2**20


def test_the_peak_sees_an_allocation_and_keeps_it() -> None:
    before = memory_use("cpu")
    # Earlier tests of this process may have left a higher mark: go 96 MiB beyond it.
    below_peak = int((before.peak_gib - before.current_gib) * 1024)
    block = np.ones((below_peak + 96) * MIB, dtype=np.uint8)
    during = memory_use("cpu")
    del block
    after = memory_use("cpu")
    assert (during.peak_gib - before.peak_gib) * 1024 > 80
    assert after.peak_gib >= during.peak_gib - 1e-3
    assert after.current_gib * 1024 < during.current_gib * 1024 - 80
    assert after.reserved_gib is None


def test_the_peak_is_at_least_what_is_resident() -> None:
    assert host_peak_bytes() / 2**30 >= memory_use("cpu").current_gib - 0.05


def test_a_stopwatch_measures_the_block_and_nothing_after_it() -> None:
    started = time.perf_counter()
    with Stopwatch("cpu") as watch:
        assert math.isnan(watch.seconds)
        time.sleep(0.05)
    time.sleep(0.05)
    whole = time.perf_counter() - started
    assert 0.049 < watch.seconds < whole - 0.049


def test_no_time_at_all_has_no_speed() -> None:
    assert tok_per_s(100, 0.5) == 200
    assert math.isnan(tok_per_s(100, 0.0))


@pytest.mark.gpu
def test_on_a_gpu_peak_and_time_are_the_devices() -> None:
    reset_peak("cuda")
    before = memory_use("cuda").peak_gib
    with Stopwatch("cuda") as watch:
        a = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            a = a @ a * 0
    assert memory_use("cuda").peak_gib - before >= 4096 * 4096 * 4 / 2**30 * 0.99
    assert watch.seconds > 0
