"""The model: its size, its names, and its arithmetic against formulas written out by hand."""

import math

import pytest
import torch
from torch import Tensor

from recipes.init_weights import initialize
from recipes.model import Llama, rope_tables, rotate
from recipes.model_shape import FLAVORS, ModelShape, num_parameters, parameter_names

SHAPE = ModelShape(vocab_size=61, dim=48, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=80, max_seq_len=32)


def build(shape: ModelShape, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(shape)
    initialize(model, seed, "cpu")
    return model


def random_tokens(num_sequences: int, seq_len: int) -> Tensor:
    return torch.randint(0, SHAPE.vocab_size, (num_sequences, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_flavor_has_exactly_the_parameters_that_its_shape_says(flavor: str) -> None:
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(FLAVORS[flavor])


def test_the_papers_models_have_the_papers_numbers_of_parameters() -> None:
    assert num_parameters(FLAVORS["178M"]) == 177_622_016
    assert num_parameters(FLAVORS["512M"]) == 512_398_848


def test_parameters_are_named_as_in_torchtitan_and_are_all_the_state_there_is() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    of_a_block = [
        "attention_norm",
        *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
        "ffn_norm",
        *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
    ]
    expected = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    expected |= {f"layers.{index}.{name}.weight" for index in range(SHAPE.num_layers) for name in of_a_block}
    assert {name for name, _ in model.named_parameters()} == expected
    assert set(model.state_dict()) == expected


def test_logits_equal_the_formulas_written_out() -> None:
    """Hugging Face's LlamaForCausalLM, one head, one position and one step at a time, in float64."""
    model = build(SHAPE)
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        for parameter in model.parameters():  # away from the initial values: norms of 1 would hide a missing norm
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    weights = {name.removesuffix(".weight"): value.detach().double() for name, value in model.named_parameters()}
    size, head_dim = tokens.size(1), SHAPE.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    def turn(vector: Tensor, position: int) -> Tensor:
        half = head_dim // 2
        angle = position * torch.tensor([10000.0 ** (-2 * j / head_dim) for j in range(half)], dtype=torch.float64)
        turned = torch.complex(vector[:half], vector[half:]) * torch.complex(angle.cos(), angle.sin())
        return torch.cat((turned.real, turned.imag))

    x = weights["tok_embeddings"][tokens[0]]  # (T, D)
    for index in range(SHAPE.num_layers):
        name = f"layers.{index}"
        normed = norm(x, f"{name}.attention_norm")
        q, k, v = (normed @ weights[f"{name}.attention.{w}"].T for w in ("wq", "wk", "wv"))
        mixed = torch.zeros(size, SHAPE.dim, dtype=torch.float64)
        for head in range(SHAPE.num_heads):
            kv_head = head // (SHAPE.num_heads // SHAPE.num_kv_heads)
            of_q, of_kv = (slice(h * head_dim, (h + 1) * head_dim) for h in (head, kv_head))
            for t in range(size):
                turned = turn(q[t, of_q], t)
                scores = torch.stack([turned @ turn(k[s, of_kv], s) for s in range(t + 1)]) / math.sqrt(head_dim)
                mixed[t, of_q] = scores.softmax(0) @ v[: t + 1, of_kv]
        x = x + mixed @ weights[f"{name}.attention.wo"].T
        normed = norm(x, f"{name}.ffn_norm")
        gate, up = (normed @ weights[f"{name}.feed_forward.{w}"].T for w in ("w1", "w3"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{name}.feed_forward.w2"].T
    expected = norm(x, "norm") @ weights["output"].T

    with torch.no_grad():
        logits = model(tokens)
    assert logits.shape == (1, size, SHAPE.vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0].double(), expected, rtol=2e-5, atol=2e-5)


def test_a_token_changes_the_logits_from_its_position_on_and_none_before() -> None:
    model, tokens = build(SHAPE), random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % SHAPE.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_rotation_keeps_lengths_and_scores_depend_on_the_distance_only() -> None:
    cos, sin = rope_tables(SHAPE)
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(SHAPE.head_dim, generator=generator).expand(1, 1, 32, -1) for _ in range(2))
    turned_q, turned_k = rotate(q, cos, sin)[0, 0], rotate(k, cos, sin)[0, 0]  # the same vector at each position
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, 0].norm(dim=-1))
    assert torch.equal(turned_q[0], q[0, 0, 0])
    scores = turned_q @ turned_k.T  # (position of q, position of k)
    for distance in (0, 1, 5, 20):
        along = scores.diagonal(offset=-distance)
        torch.testing.assert_close(along, along[0].expand_as(along), rtol=1e-4, atol=1e-4)
    assert scores.std() > 0.1


def test_rotation_keeps_the_dtype_but_is_computed_in_fp32() -> None:
    cos, sin = rope_tables(SHAPE)
    x = torch.randn(1, 2, 32, SHAPE.head_dim, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


def test_grouped_heads_equal_full_attention_with_the_shared_heads_repeated() -> None:
    grouped, full = build(SHAPE), build(ModelShape(**{**vars(SHAPE), "num_kv_heads": SHAPE.num_heads}))
    with torch.no_grad():
        theirs = dict(full.named_parameters())
        for name, value in grouped.named_parameters():
            if name.endswith(("wk.weight", "wv.weight")):
                by_head = value.view(SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.dim)
                value = by_head.repeat_interleave(SHAPE.num_heads // SHAPE.num_kv_heads, dim=0).flatten(0, 1)
            theirs[name].copy_(value)
        tokens = random_tokens(2, 16)
        torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-6)


def test_a_sequence_longer_than_the_rope_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"33 tokens is longer than the model's 32 positions.*training\.seq_len"):
        build(SHAPE)(random_tokens(1, 33))


def test_recomputing_a_block_in_the_backward_changes_no_bit() -> None:
    tokens = random_tokens(2, 16)
    gradients = {}
    for recompute in (False, True):
        model = build(SHAPE)
        num_calls = 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1

        for layer in model.layers:
            layer.recompute_in_backward = recompute
            layer.feed_forward.register_forward_pre_hook(count)
        model(tokens).square().sum().backward()
        assert num_calls == SHAPE.num_layers * (2 if recompute else 1)
        gradients[recompute] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(torch.equal(gradients[True][name], gradient) for name, gradient in gradients[False].items())


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_names_of_parameters_are_known_without_torch(flavor: str) -> None:
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert parameter_names(FLAVORS[flavor]) == [name for name, _ in model.named_parameters()]
