"""The loss: a sum over tokens, in fp32, that padding and micro-batching cannot change."""

import math

import torch
from torch.nn.functional import cross_entropy

from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel


def example(num_sequences: int = 4, seq_len: int = 6, vocab_size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_sequences, seq_len, vocab_size, generator=generator)
    labels = torch.randint(0, vocab_size, (num_sequences, seq_len), generator=generator)
    return logits.requires_grad_(), labels


def test_it_is_the_sum_of_minus_log_probabilities() -> None:
    logits, labels = example()
    by_hand = -sum(logits[b, t].softmax(0)[labels[b, t]].log() for b in range(4) for t in range(6))
    loss = cross_entropy_sum(logits, labels)
    assert loss.shape == ()
    torch.testing.assert_close(loss, by_hand)


def test_equal_logits_cost_ln_v_per_token() -> None:
    _, labels = example()
    loss = cross_entropy_sum(torch.full((4, 6, 11), 7.0), labels)
    torch.testing.assert_close(loss, torch.tensor(24 * math.log(11)))


def test_ignored_labels_count_nothing_and_get_no_gradient() -> None:
    logits, labels = example()
    labels[0, 3:] = labels[2] = IGNORE_INDEX
    loss = cross_entropy_sum(logits, labels)
    loss.backward()
    is_valid = labels != IGNORE_INDEX
    torch.testing.assert_close(loss, cross_entropy(logits[is_valid], labels[is_valid], reduction="sum"))
    assert torch.equal(logits.grad != 0, is_valid[..., None].expand_as(logits))


def test_a_batch_of_ignored_labels_only_costs_nothing() -> None:
    logits, labels = example()
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_micro_batches_add_up() -> None:
    logits, labels = example()
    labels[1, 2:] = IGNORE_INDEX
    cross_entropy_sum(logits, labels).backward()
    whole, logits.grad = logits.grad, None
    for index in range(4):
        cross_entropy_sum(logits[index : index + 1], labels[index : index + 1]).backward()
    torch.testing.assert_close(logits.grad, whole)


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = example()
    low = logits.detach().bfloat16().requires_grad_()
    loss = cross_entropy_sum(low, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy_sum(low.float(), labels))
    loss.backward()
    assert low.grad.dtype == torch.bfloat16


def test_without_a_process_group_a_sum_over_ranks_is_the_value_itself() -> None:
    value = torch.tensor(3.5, requires_grad=True)
    total = sum_over_data_parallel(value, None)
    assert total.item() == 3.5
    assert not total.requires_grad
