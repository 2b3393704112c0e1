"""Log-probabilities of packed rows: each member as if it were alone, the head as if it were whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from learning_support import (
    exact_llama,
    golden,
    group,
    poisoned,
    random_groups,
    sample,
    tiny_gpt2,
    tiny_llama,
    trajectory,
)
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit
from palestra.rl.attention import use_packed_attention
from palestra.rl.batch import Batch, pack
from palestra.rl.head import Head, head_logprobs
from palestra.rl.logprobs import check_head, score_row
from palestra.rl.objective import Objective
from palestra.rollout.types import Group

LOGPROB = golden("logprob")
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "rotary, tied head": tiny_llama,
    "rotary, own head": lambda: tiny_llama(tie=False),
    "absolute positions": tiny_gpt2,
}


def sliding_window_model() -> PreTrainedModel:
    shape = tiny_llama().config
    config = MistralConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=shape.vocab_size,
        sliding_window=5,
        initializer_range=0.2,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(config).double()


def batch_of(seed: int, tokens: int, **shape: int) -> Batch:
    groups = random_groups(np.random.default_rng(seed), **shape)
    return pack(groups, [ones(g) for g in groups], tokens, Objective())


def ones(made: Group) -> Credit:
    return Credit(tuple(np.ones(t.sampled_tokens) for t in made.trajectories))


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed_loss(model: PreTrainedModel, batch: Batch) -> tuple[dict[tuple[int, int], float], Tensor]:
    """Each token's log-probability by (row of its trajectory, place among its tokens), and a weighted sum of them."""
    head, found, total = Head.of(model), {}, torch.zeros((), dtype=torch.float64)
    for row in batch.rows:
        scored = score_row(model, head, row)
        counter: dict[int, int] = {}
        for member, value in zip(row.actions.sample.tolist(), scored.logprobs.tolist(), strict=True):
            counter[member] = counter.get(member, -1) + 1
            found[(member, counter[member])] = value
        weights = torch.from_numpy(np.cos(row.actions.sample + row.actions.targets))
        total = total + (weights * scored.logprobs).sum()
    return found, total


def padded_loss(model: PreTrainedModel, batch: Batch, width: int) -> tuple[dict[tuple[int, int], float], Tensor]:
    """The plain way: rows padded to a width, full logits, transformers' own attention."""
    model.set_attn_implementation("sdpa")
    found, total = {}, torch.zeros((), dtype=torch.float64)
    for row in batch.rows:
        for start, end in zip(row.boundaries[:-1], row.boundaries[1:], strict=True):
            ids = torch.full((1, width), 1)
            ids[0, : end - start] = torch.from_numpy(row.ids[start:end])
            mask = torch.zeros((1, width), dtype=torch.long)
            mask[0, : end - start] = 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].double()
            mine = np.flatnonzero((row.predictors >= start) & (row.predictors < end))
            temperature = torch.from_numpy(row.actions.temperature[mine]).double()[:, None]
            everything = torch.log_softmax(logits[row.predictors[mine] - start] / temperature, -1)
            values = everything[torch.arange(len(mine)), torch.from_numpy(row.actions.targets[mine])]
            weights = torch.from_numpy(np.cos(row.actions.sample[mine] + row.actions.targets[mine]))
            total = total + (weights * values).sum()
            member = int(row.actions.sample[mine[0]])
            found |= {(member, i): value for i, value in enumerate(values.tolist())}
    return found, total


@pytest.mark.parametrize("make", [*MODELS.values(), sliding_window_model], ids=[*MODELS, "sliding window"])
def test_packed_padded_and_alone_are_the_same(make: Callable[[], PreTrainedModel]) -> None:
    results = []
    for tokens, width in ((1000, None), (1, None), (30, None), (1000, 24), (1000, 40)):
        model = make().eval()
        batch = batch_of(1, tokens)
        if width is None:
            use_packed_attention(model)
            found, loss = packed_loss(model, batch)
        else:
            found, loss = padded_loss(model, batch, width)
        results.append((found, gradients(model, loss)))
    for found, grads in results[1:]:
        assert found == pytest.approx(results[0][0], abs=1e-9)
        assert grads.keys() == results[0][1].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=1e-9, atol=1e-9, msg=name)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 200))
def test_any_micro_batching_of_any_ragged_batch_gives_the_same_loss_and_gradient(seed: int, tokens: int) -> None:
    model = exact_llama()
    use_packed_attention(model)
    whole, one = packed_loss(model, batch_of(seed, 100_000))
    expected = gradients(model, one)
    split, many = packed_loss(model, batch_of(seed, tokens))
    assert split == pytest.approx(whole, abs=1e-9)
    for name, grad in gradients(model, many).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_a_neighbour_in_the_row_changes_nothing() -> None:
    model = tiny_gpt2().eval()
    use_packed_attention(model)
    rows = [sample(np.arange(12).tolist(), [0] + [1] * 11), sample(np.arange(20, 29).tolist(), [0] + [1] * 8)]
    made = [group("g", [trajectory(f"t{i}", [row], 1.0) for i, row in enumerate(rows[k:])]) for k in (0, 1)]
    both, alone = (pack([g], [ones(g)], 100, Objective()) for g in made)
    second = score_row(model, Head.of(model), both.rows[0]).logprobs[11:]
    torch.testing.assert_close(second, score_row(model, Head.of(model), alone.rows[0]).logprobs, rtol=1e-12, atol=1e-12)


def test_dropout_in_the_model_is_never_applied() -> None:
    model = tiny_gpt2(dtype=torch.float32).eval()
    assert model.config.attn_pdrop > 0
    use_packed_attention(model)
    row = batch_of(0, 1000).rows[0]
    with torch.no_grad():
        once, again = (score_row(model, Head.of(model), row).logprobs for _ in range(2))
    assert torch.equal(once, again)


def test_float32_log_probabilities_do_not_depend_on_the_row() -> None:
    model = tiny_llama(dtype=torch.float32).eval()
    use_packed_attention(model)
    with torch.no_grad():
        one, many = (packed_loss(model, batch_of(5, tokens))[0] for tokens in (1000, 1))
    assert one == pytest.approx(many, abs=1e-5)


def test_the_head_has_the_golden_values_at_each_tokens_temperature() -> None:
    case = LOGPROB["logprob/per_token_temperature"]
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    head = Head(torch.eye(4, dtype=torch.float64))
    temperature = torch.tensor(case["inputs"]["temperature"], dtype=torch.float64)
    found, _ = head_logprobs(head, logits, torch.tensor(case["inputs"]["target"]), temperature)
    np.testing.assert_allclose(found.detach(), case["expected"]["logp"], atol=1e-9)
    found.backward(torch.tensor(case["inputs"]["upstream_grad"], dtype=torch.float64))
    np.testing.assert_allclose(logits.grad, case["expected"]["grad_logits"], atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_chunked_head_has_the_golden_values_and_gradients(dtype: torch.dtype, chunk: int, frozen: bool) -> None:
    case = LOGPROB["logprob/fused_linear"]
    inputs, expected = case["inputs"], case["expected"]
    mask = np.array(inputs["mask"], bool)
    hidden = torch.tensor(inputs["hidden"], dtype=dtype, requires_grad=True)
    weight = torch.tensor(inputs["weight"], dtype=dtype, requires_grad=not frozen)
    targets = torch.tensor(inputs["target"])[mask]
    temperature = torch.full((3,), case["conventions"]["temperature"], dtype=dtype)
    found, entropy = head_logprobs(Head(weight), hidden[torch.from_numpy(mask)], targets, temperature, chunk=chunk)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(found.detach(), np.array(expected["logp"])[mask], atol=tolerance)
    np.testing.assert_allclose(entropy.detach(), np.array(expected["entropy"])[mask], atol=tolerance)
    found.backward(torch.tensor(poisoned([inputs["upstream_grad"]], 0.0)[0][mask], dtype=dtype))
    np.testing.assert_allclose(hidden.grad, expected["grad_hidden"], atol=tolerance)
    if frozen:
        assert weight.grad is None
    else:
        np.testing.assert_allclose(weight.grad, expected["grad_weight"], atol=tolerance)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize(("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, None), (True, 2.0, 3.0)])
def test_fused_equals_naive(
    frozen: bool, entropy_gradient: bool, bias: bool, scale: float, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)

    hidden, weight, offset = random(7, 5), random(11, 5, grad=not frozen), random(11, grad=not frozen)
    targets = torch.randint(11, (7,), generator=generator)
    temperature = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5
    a, b = random(7, grad=False), random(7, grad=False)

    def naive() -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T + (offset if bias else 0)
        logits = logits * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        everything = torch.log_softmax(logits / temperature[:, None], -1)
        return everything[torch.arange(7), targets], -(everything.exp() * everything).sum(-1)

    head = Head(weight, offset if bias else None, scale, softcap)
    leaves = [hidden, *([] if frozen else [weight]), *([offset] if bias and not frozen else [])]
    ours = head_logprobs(head, hidden, targets, temperature, entropy_gradient=entropy_gradient, chunk=3)
    theirs = naive()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    weigh = [a, b] if entropy_gradient else [a]
    for x, y in zip(
        torch.autograd.grad(sum((w * o).sum() for w, o in zip(weigh, ours, strict=False)), leaves),  # type: ignore[arg-type]
        torch.autograd.grad(sum((w * o).sum() for w, o in zip(weigh, theirs, strict=False)), leaves),  # type: ignore[arg-type]
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [True, False])
def test_label_smoothing_is_the_cross_entropy_of_torch(frozen: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64).requires_grad_(not frozen)
    targets = torch.randint(11, (7,), generator=generator)
    leaves = [hidden] if frozen else [hidden, weight]
    ours, _ = head_logprobs(Head(weight), hidden, targets, torch.ones(7), smoothing=0.1, chunk=3)
    theirs = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(-ours.sum(), theirs, rtol=1e-12, atol=1e-12)
    for x, y in zip(torch.autograd.grad(-ours.sum(), leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_the_entropy_bonus_has_the_golden_value_and_gradient() -> None:
    case = golden("kl_entropy")["entropy/bonus_token_mean"]
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    head = Head(torch.eye(4, dtype=torch.float64))
    zeros = torch.zeros(2, dtype=torch.int64)
    _, entropy = head_logprobs(head, logits[mask], zeros, torch.ones(2), entropy_gradient=True)
    loss = -case["conventions"]["coef"] * entropy.mean()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(case["expected"]["loss"], abs=1e-9)
    np.testing.assert_allclose(logits.grad, case["expected"]["grad_logits"], atol=1e-9)


def test_a_word_that_cannot_be_is_no_poison() -> None:
    logits = torch.tensor([[0.0, 1e4, -1e4]], requires_grad=True)
    for frozen in (True, False):
        head = Head(torch.eye(3).requires_grad_(not frozen))
        found = head_logprobs(head, logits, torch.tensor([1]), torch.ones(1), entropy_gradient=True)
        assert [float(x.detach()) for x in found] == [0.0, 0.0]
        (grad,) = torch.autograd.grad(found[0].sum() + found[1].sum(), logits)
        assert grad.tolist() == [[0.0, 0.0, 0.0]]


def test_bfloat16_models_get_float32_log_probabilities() -> None:
    model = tiny_llama(dtype=torch.bfloat16).eval()
    use_packed_attention(model)
    scored = score_row(model, Head.of(model), batch_of(0, 1000).rows[0])
    assert scored.logprobs.dtype == scored.entropy.dtype == torch.float32
    assert not np.array_equal(scored.logprobs.detach(), scored.logprobs.detach().bfloat16().float())


def test_a_head_that_does_something_unknown_is_refused() -> None:
    class Louder(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)  # type: ignore[arg-type]
            output.logits = output.logits * 1.5
            return output

    config = tiny_llama().config
    assert isinstance(config, LlamaConfig)
    model = Louder(config)
    use_packed_attention(model)
    with pytest.raises(ConfigError, match="total variation"):
        check_head(model, Head.of(model))


def test_layers_that_carry_state_across_members_are_refused() -> None:
    model = tiny_llama()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        use_packed_attention(model)
