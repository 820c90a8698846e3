from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl.model.attention import ForestAttend
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Toy
from qerl.model.spec import LINEARS
from qerl.quant.bf16 import BF16
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Packed

TREE = [(None, 9, False), (0, 6, True), (0, 11, True)]


@pytest.fixture
def packed(forest: Callable[..., Any]) -> Packed:
    result: Packed = forest(TREE)[0]
    return result


def make_policy(**settings: Any) -> Policy:
    settings = {"lora": LoRAConfig(rank=4, alpha=8)} | settings
    return load_policy(Toy(), settings.pop("format", NVFP4()), **settings)


def scored(policy: Policy, packed: Packed) -> Tensor:
    with torch.no_grad():
        return policy.score(packed, 1.0)[0]


def test_only_adapters_are_trained() -> None:
    policy = make_policy()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * policy.spec.layers
    assert all(name.endswith(("lora_a", "lora_b")) for name in trained)


def test_a_fresh_adapter_is_the_base(packed: Packed) -> None:
    assert torch.equal(scored(make_policy(), packed), scored(make_policy(lora=None), packed))


def test_the_reference_is_the_base_bit_for_bit_also_for_trained_adapters(packed: Packed) -> None:
    policy, base = make_policy(), make_policy(lora=None)
    for adapter in policy.adapters().values():
        adapter.lora_b.data.normal_(std=0.1)
    with_adapters = scored(policy, packed)
    with policy.reference():
        assert torch.equal(scored(policy, packed), scored(base, packed))
    assert torch.equal(scored(policy, packed), with_adapters)
    assert not torch.allclose(with_adapters, scored(base, packed), atol=1e-3)


def test_the_reference_scope_ends_with_an_error_too(packed: Packed) -> None:
    policy = make_policy()

    def fail_inside() -> None:
        with policy.reference():
            with policy.reference():
                pass
            assert not any(a.enabled for a in policy.adapters().values())  # the outer still holds
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert all(a.enabled for a in policy.adapters().values())


@pytest.mark.parametrize("target", LINEARS)
def test_each_lora_target_moves_the_scores(target: str, packed: Packed) -> None:
    policy = make_policy()
    before = scored(policy, packed)
    for index in range(policy.spec.layers):
        adapter = policy.adapters()[f"layers.{index}.{target}"]
        adapter.lora_b.data.normal_(std=0.3)
        moved = scored(policy, packed)
        assert (moved - before).abs().max() > 1e-3, index
        adapter.lora_b.data.zero_()
    assert torch.equal(scored(policy, packed), before)


@pytest.mark.parametrize("target", LINEARS)
def test_only_the_targets_carry_adapters(target: str) -> None:
    policy = make_policy(lora=LoRAConfig(rank=4, alpha=8, targets=[target]))
    assert set(policy.adapters()) == {f"layers.{i}.{target}" for i in range(policy.spec.layers)}


def test_an_adapter_starts_the_same_whatever_else_is_adapted() -> None:
    few = make_policy(lora=LoRAConfig(rank=4, alpha=8, targets=["v_proj"])).adapter_state()
    many = make_policy().adapter_state()
    assert all(torch.equal(matrix, many[name]) for name, matrix in few.items())
    other = make_policy(seed=1).adapter_state()
    assert not torch.equal(other["layers.0.v_proj.lora_a"], many["layers.0.v_proj.lora_a"])


def test_noisy_norms_are_those_before_qkv_and_gate_up(packed: Packed) -> None:
    policy = make_policy()
    norms = policy.noisy_norms
    assert len(norms) == 2 * policy.spec.layers
    assert norms[0] is policy.layers()[0].input_norm
    assert norms[3] is policy.layers()[1].post_attention_norm
    before = scored(policy, packed)
    for norm in norms:
        clean = norm.weight.detach().clone()
        norm.weight.data.add_(torch.randn_like(norm.weight) * 0.05)
        assert (scored(policy, packed) - before).abs().max() > 1e-4
        norm.weight.data.copy_(clean)
    assert torch.equal(scored(policy, packed), before)


def test_training_moves_the_policy_and_no_frozen_byte(packed: Packed) -> None:
    policy = make_policy(shadow=True)
    before, base = policy.adapter_state(), policy.base_hash()
    with policy.reference():
        reference = scored(policy, packed)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    start = scored(policy, packed).mean()
    for _ in range(3):
        optimizer.zero_grad()
        logprobs, _ = policy.score(packed, 1.0)
        (-logprobs.mean()).backward()
        optimizer.step()
    assert scored(policy, packed).mean() > start + 0.1
    assert policy.base_hash() == base
    assert any(not torch.equal(before[n], m) for n, m in policy.adapter_state().items())
    with policy.reference():
        assert torch.equal(scored(policy, packed), reference)


def test_the_base_hash_sees_every_kind_of_frozen_tensor() -> None:
    policy = make_policy()
    linear = policy.linears()["layers.1.down_proj"]
    bias = policy.linears()["layers.0.k_proj"].bias
    assert bias is not None
    hashes = {policy.base_hash()}
    places = (*linear.packed.tensors.values(), bias, policy.decoder.embed)
    for tensor in (*places, policy.decoder.final_norm.weight.data):
        tensor.reshape(-1).view(torch.uint8)[0] ^= 1
        hashes.add(policy.base_hash())
    assert len(hashes) == 1 + len(places) + 1


def test_recomputed_layers_give_the_same_gradients_with_less_kept(packed: Packed) -> None:
    kept: dict[bool, int] = {}
    grads: dict[bool, dict[str, Tensor]] = {}
    for recompute in (False, True):
        policy = make_policy(checkpoint_layers=recompute)
        for adapter in policy.adapters().values():
            adapter.lora_b.data.fill_(0.01)
        held: dict[int, int] = {}

        def keep(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = policy.score(packed, 1.0)
        kept[recompute] = sum(held.values())
        logprobs.sum().backward()
        grads[recompute] = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    assert kept[True] < 0.3 * kept[False]
    assert all(torch.equal(grad, grads[True][name]) for name, grad in grads[False].items())
    assert all(grad.abs().max() > 0 for grad in grads[True].values())


def test_what_is_kept_for_the_backward_grows_with_tokens_not_with_weights(
    forest: Callable[..., Any],
) -> None:
    packed = forest([(None, 4, False), (0, 4, True)])[0]
    policy = make_policy()
    frozen = {p for lin in policy.linears().values() for p in lin.packed.data_ptrs().values()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.score(packed, 1.0)
    kept = sum(size for pointer, size in held.items() if pointer not in frozen)
    dense = 4 * policy.spec.linear_weights
    assert kept < 0.25 * dense  # eight tokens' activations, adapters included


def test_adapter_state_goes_round(packed: Packed) -> None:
    one, two = make_policy(seed=0), make_policy(seed=1)
    for adapter in one.adapters().values():
        adapter.lora_b.data.normal_(std=0.1)
    pointers = [p.data_ptr() for p in two.parameters()]
    two.load_adapter_state(one.adapter_state())
    assert torch.equal(scored(one, packed), scored(two, packed))
    assert pointers == [p.data_ptr() for p in two.parameters()]
    state = one.adapter_state()
    assert all(m.dtype == torch.float32 and m.device.type == "cpu" for m in state.values())
    one.adapters()["layers.0.q_proj"].lora_b.data.zero_()
    assert state["layers.0.q_proj.lora_b"].abs().max() > 0  # a copy, not a view


def test_adapter_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    policy = make_policy()
    state = policy.adapter_state()
    short = {name: m for name, m in state.items() if "up_proj" not in name}
    for bad, words in (
        (short, "4 missing"),
        (state | {"layers.9.q_proj.lora_a": torch.zeros(4, 128)}, "1 unknown"),
        (make_policy(lora=LoRAConfig(rank=8, alpha=8)).adapter_state(), "ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            policy.load_adapter_state({name: m + 1 for name, m in bad.items()})
    assert all(torch.equal(m, state[name]) for name, m in policy.adapter_state().items())


def test_a_change_of_dtype_is_refused() -> None:
    policy = make_policy()
    for convert in (policy.bfloat16, policy.half, policy.double):
        with pytest.raises(ValueError, match="stay fp32"):
            convert()
    with pytest.raises(ValueError, match="stay fp32"):
        policy.to(torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in policy.parameters())


def test_a_move_takes_the_packed_bytes_along() -> None:
    policy = make_policy(shadow=True).to("meta")
    tensors = [t for lin in policy.linears().values() for t in lin.packed.tensors.values()]
    tensors += [lin.shadow for lin in policy.linears().values() if lin.shadow is not None]
    tensors += [*policy.parameters(), policy.decoder.embed, policy.decoder.rotary.frequencies]
    assert {t.device.type for t in tensors} == {"meta"}
    assert policy.linears()["layers.0.q_proj"].packed.tensors["block_scale"].dtype.itemsize == 1


def test_memory_is_reported_by_part() -> None:
    spec = Toy().spec
    policy = make_policy()
    report = policy.memory_bytes()
    scales = 4 * 7 * spec.layers  # one fp32 tensor scale a linear
    assert report["packed"] == spec.linear_weights * 4.5 / 8 + scales
    assert report["shadow"] == 0
    assert report["embeddings"] == spec.embedding_weights * 4
    assert report["adapters"] == 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    policy.set_shadow(True)
    assert policy.memory_bytes() == report | {"shadow": spec.linear_weights * 4}
    policy.set_shadow(False)
    assert policy.memory_bytes() == report


def test_a_shadow_that_is_the_stored_weight_counts_once() -> None:
    policy = make_policy(format=BF16(), dtype=torch.bfloat16, shadow=True)
    assert policy.memory_bytes()["shadow"] == 0
    assert make_policy(format=BF16(), shadow=True).memory_bytes()["shadow"] > 0


@pytest.mark.parametrize(("format", "bits"), [(BF16(), 16.0), (NVFP4(), 4.5), (NF4(), 4.127)])
def test_bits_per_weight_are_those_in_memory(format: Any, bits: float) -> None:
    assert make_policy(format=format).linear_bits_per_weight() == pytest.approx(bits, abs=0.01)


def test_a_greedy_temperature_is_refused(packed: Packed) -> None:
    with pytest.raises(ValueError, match="temperature=0"):
        make_policy().score(packed, 0.0)


def test_a_score_is_the_logprob_of_the_next_token_at_its_predictor(packed: Packed) -> None:
    policy = make_policy(lora=None)
    with torch.no_grad():
        hidden = policy.decoder(packed.tokens, packed.positions, ForestAttend(packed.segments))
        logits = policy.decoder.logits(hidden) / 0.5
        logprobs, entropy = policy.score(packed, 0.5)
    for n, (row, target) in enumerate(zip(packed.predictors, packed.targets, strict=True)):
        p = logits[row].double().softmax(0)
        assert logprobs[n].item() == pytest.approx(p[target].log().item(), abs=1e-5)
        assert entropy[n].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)
