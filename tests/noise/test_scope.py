import copy

import pytest
import torch
from torch import nn

from qerl.noise.scope import draw, noisy

SIGMA = 1e-2


def norms(count: int = 4, width: int = 64) -> list[nn.RMSNorm]:
    made = [nn.RMSNorm(width) for _ in range(count)]
    for index, norm in enumerate(made):
        nn.init.normal_(norm.weight, mean=1 + index, std=0.1)
        norm.weight.requires_grad_(False)
    return made


def bits(made: list[nn.RMSNorm]) -> list[torch.Tensor]:
    return [norm.weight.detach().clone().view(torch.int32) for norm in made]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def made() -> list[nn.RMSNorm]:
    return norms()


def test_noise_restores_the_same_bits(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        assert not any(torch.equal(a, b) for a, b in zip(bits(made), before, strict=True))
    assert equal(bits(made), before)


def test_bits_that_compare_equal_but_differ_are_restored_too(made: list[nn.RMSNorm]) -> None:
    made[0].weight.data[0] = -0.0
    made[0].weight.data[1] = torch.nan
    before = bits(made)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        pass
    assert equal(bits(made), before)


def test_an_exception_inside_the_block_restores_the_weights(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    with (
        pytest.raises(KeyError),
        noisy(made, SIGMA, seed=0, rollout_step=3),
    ):
        raise KeyError("the engine fell over")
    assert equal(bits(made), before)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        pass  # and the norms are free for the next rollout


def test_an_exception_while_perturbing_restores_the_weights(
    made: list[nn.RMSNorm], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bits(made)

    def fail_at_the_third(shape: torch.Size, *, seed: int, rollout_step: int, index: int):
        if index == 2:
            raise MemoryError
        return torch.ones(shape)

    monkeypatch.setattr("qerl.noise.scope.draw", fail_at_the_third)
    with pytest.raises(MemoryError), noisy(made, SIGMA, seed=0, rollout_step=3):
        pass
    assert equal(bits(made), before)


def test_a_thousand_scopes_accumulate_nothing(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    for step in range(1000):
        with noisy(made, 0.3, seed=0, rollout_step=step):
            pass
    assert equal(bits(made), before)


def test_the_noise_is_a_function_of_seed_step_and_norm_alone(made: list[nn.RMSNorm]) -> None:
    def inside(seed: int, step: int) -> list[torch.Tensor]:
        with noisy(made, SIGMA, seed=seed, rollout_step=step):
            return bits(made)

    torch.manual_seed(1)
    first = inside(5, 7)
    torch.manual_seed(2)
    assert equal(inside(5, 7), first)
    assert not equal(inside(5, 8), first)
    assert not equal(inside(6, 7), first)


def test_drawing_noise_leaves_the_global_generator_alone(made: list[nn.RMSNorm]) -> None:
    state = torch.get_rng_state()
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        pass
    assert torch.equal(torch.get_rng_state(), state)


def test_every_norm_gets_noise_of_its_own() -> None:
    shape = torch.Size([64])
    draws = torch.stack([draw(shape, seed=0, rollout_step=1, index=i) for i in range(8)])
    correlation = torch.corrcoef(draws) - torch.eye(8)
    assert correlation.abs().max() < 0.6
    assert draws.dtype == torch.float32


def test_the_first_draw_of_seed_zero_is_pinned() -> None:
    # A resumed run on another machine must draw the same noise.
    drawn = draw(torch.Size([3]), seed=0, rollout_step=0, index=0)
    pinned = torch.tensor([0.779092, -0.345049, -0.361792])
    torch.testing.assert_close(drawn, pinned, rtol=1e-5, atol=1e-6)


def test_the_report_measures_what_was_stored() -> None:
    made = norms(count=8, width=4096)
    clean = torch.cat([norm.weight.clone() for norm in made])
    with noisy(made, SIGMA, seed=0, rollout_step=3) as report:
        applied = torch.cat([norm.weight for norm in made]) - clean
    assert report.applied_std == pytest.approx(float(applied.square().mean().sqrt()), rel=1e-5)
    assert report.applied_std == pytest.approx(SIGMA, rel=0.02)
    assert report.relative_std == pytest.approx(
        report.applied_std / float(clean.square().mean().sqrt()), rel=1e-5
    )
    assert report.changed_fraction > 0.999
    assert (report.sigma, report.tensors, report.channels) == (SIGMA, 8, 8 * 4096)
    assert report.metrics()["noise/applied_std"] == report.applied_std


def test_the_smallest_published_noise_survives_in_fp32() -> None:
    with noisy(norms(width=4096), 1e-4, seed=0, rollout_step=3) as report:
        assert report.applied_std == pytest.approx(1e-4, rel=0.05)
        assert report.changed_fraction > 0.99


def test_the_output_of_a_norm_scales_by_one_plus_noise_over_weight(made: list[nn.RMSNorm]) -> None:
    x = torch.randn(5, 64)
    clean = made[0](x)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        noise = draw(torch.Size([64]), seed=0, rollout_step=3, index=0)
        expected = clean * (1 + SIGMA * noise / (made[0].weight - SIGMA * noise))
        torch.testing.assert_close(made[0](x), expected)


def test_weights_change_in_place(made: list[nn.RMSNorm]) -> None:
    pointers = [norm.weight.data_ptr() for norm in made]
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        assert [norm.weight.data_ptr() for norm in made] == pointers
    assert [norm.weight.data_ptr() for norm in made] == pointers


def test_sigma_zero_touches_nothing_and_reports_nothing(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    versions = [norm.weight._version for norm in made]
    with noisy(made, 0.0, seed=0, rollout_step=3) as report:
        assert equal(bits(made), before)
    assert [norm.weight._version for norm in made] == versions
    assert (report.sigma, report.tensors, report.applied_std, report.changed_fraction) == (0,) * 4


@pytest.mark.parametrize("sigma", [0.0, SIGMA])
def test_no_norm_is_refused_in_clean_stages_too(sigma: float) -> None:
    with pytest.raises(ValueError, match="no norm"), noisy([], sigma, seed=0, rollout_step=0):
        pass


@pytest.mark.parametrize("sigma", [0.0, SIGMA])
def test_a_bfloat16_norm_is_refused_with_the_reason(sigma: float) -> None:
    made = norms()
    made[1] = made[1].to(torch.bfloat16)
    with (
        pytest.raises(ValueError, match=r"norm 1 has torch.bfloat16 .* fp32"),
        noisy(made, sigma, seed=0, rollout_step=0),
    ):
        pass


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_an_impossible_sigma_is_refused(made: list[nn.RMSNorm], sigma: float) -> None:
    with pytest.raises(ValueError, match="sigma="), noisy(made, sigma, seed=0, rollout_step=0):
        pass


def test_noise_that_rounds_away_everywhere_is_an_error(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    with (
        pytest.raises(RuntimeError, match="no weight of 4 norms changed"),
        noisy(made, 1e-12, seed=0, rollout_step=0),
    ):
        pass
    assert equal(bits(made), before)


def test_a_nested_scope_is_refused_and_the_outer_one_restores(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    with noisy(made, SIGMA, seed=0, rollout_step=0):
        outer = bits(made)
        with (
            pytest.raises(ValueError, match="carries noise already"),
            noisy([nn.RMSNorm(64), *made], SIGMA, seed=0, rollout_step=1),
        ):
            pass
        assert equal(bits(made), outer)
    assert equal(bits(made), before)


def test_a_norm_listed_twice_is_refused_and_restored(made: list[nn.RMSNorm]) -> None:
    before = bits(made)
    with (
        pytest.raises(ValueError, match="carries noise already"),
        noisy([*made, made[0]], SIGMA, seed=0, rollout_step=0),
    ):
        pass
    assert equal(bits(made), before)


@pytest.mark.parametrize("trained", [False, True])
def test_noise_works_in_every_autograd_mode(trained: bool) -> None:
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        made = norms()
        for norm in made:
            norm.weight.requires_grad_(trained)
        before = bits(made)
        with context(), noisy(made, SIGMA, seed=0, rollout_step=3) as report:
            assert report.changed_fraction > 0.9
            assert not equal(bits(made), before)
        assert equal(bits(made), before)
        assert made[0].weight.requires_grad == trained
    with noisy(made, SIGMA, seed=0, rollout_step=3), torch.inference_mode():
        assert not equal(bits(made), before)
    assert equal(bits(made), before)


def test_a_backward_pass_after_the_block_is_an_error_and_not_a_wrong_gradient(
    made: list[nn.RMSNorm],
) -> None:
    x = torch.randn(3, 64, requires_grad=True)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        inside = (x * made[0].weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()


def test_a_backward_pass_of_clean_activations_inside_the_block_is_an_error(
    made: list[nn.RMSNorm],
) -> None:
    outside = (torch.randn(3, 64, requires_grad=True) * made[0].weight).sum()
    with (
        noisy(made, SIGMA, seed=0, rollout_step=3),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        outside.backward()


def test_a_backward_pass_inside_the_block_sees_the_noisy_weights(made: list[nn.RMSNorm]) -> None:
    x = torch.randn(3, 64, requires_grad=True)
    with noisy(made, SIGMA, seed=0, rollout_step=3):
        (x * made[0].weight).sum().backward()
        noisy_weight = made[0].weight.clone()
    torch.testing.assert_close(x.grad, noisy_weight.expand(3, 64))


@pytest.mark.gpu
def test_noise_on_a_gpu_is_the_noise_on_the_cpu(made: list[nn.RMSNorm]) -> None:
    there = [copy.deepcopy(norm).cuda() for norm in made]
    before = bits(there)
    with (
        noisy(made, SIGMA, seed=4, rollout_step=3) as cpu,
        noisy(there, SIGMA, seed=4, rollout_step=3) as gpu,
    ):
        for here, other in zip(made, there, strict=True):
            torch.testing.assert_close(other.weight.cpu(), here.weight, rtol=0, atol=3e-7)
    assert gpu.applied_std == pytest.approx(cpu.applied_std, rel=1e-4)
    assert equal(bits(there), before)


@pytest.mark.gpu
def test_a_captured_graph_sees_the_noise_and_its_end() -> None:
    norm = nn.RMSNorm(64).cuda().requires_grad_(False)
    x = torch.randn(2, 64, device="cuda")
    norm(x)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x)
    graph.replay()
    clean = y.clone()
    with noisy([norm], SIGMA, seed=4, rollout_step=3):
        graph.replay()
        assert (y - clean).abs().max() > 1e-3
        torch.testing.assert_close(y, norm(x))
    graph.replay()
    assert torch.equal(y, clean)
