"""Plain tensors are whole already: batches, results in place, and errors, without any communication."""

import pytest
import torch
from torch import Tensor

from isoloco.owners import orthogonalization_cost
from isoloco.whole_matrix import Job, WholeMatrices, apply_to_whole


def jobs_of(*shapes: tuple[int, ...], **options) -> list[Job]:
    return [
        Job((torch.full(shape, float(number)),), torch.empty(shape), **options) for number, shape in enumerate(shapes)
    ]


def negated(numbers: list[int], stacks: list[Tensor]) -> Tensor:
    return stacks[0].neg_()


def batches_of(engine: WholeMatrices, jobs: list[Job]) -> list[list[int]]:
    batches = []

    def function(numbers: list[int], stacks: list[Tensor]) -> Tensor:
        batches.append(numbers)
        return stacks[0]

    engine.apply(jobs, function)
    return batches


def test_results_are_written_into_the_outputs_and_inputs_stay() -> None:
    """The function may spoil the stacks: they are copies."""
    jobs = jobs_of((3, 4), (5,), (3, 4), (2, 3, 4), (), (0, 7))
    WholeMatrices().apply(jobs, negated)
    for number, job in enumerate(jobs):
        assert bool((job.inputs[0] == number).all())
        assert bool((job.output == -number).all())


def test_the_output_may_be_the_input_and_of_another_dtype() -> None:
    matrix = torch.tensor([[1.0, 1 / 3]])
    narrow = torch.empty(1, 2, dtype=torch.bfloat16)
    WholeMatrices().apply([Job((matrix,), matrix), Job((matrix.clone(),), narrow)], negated)
    assert matrix.tolist() == (-torch.tensor([[1.0, 1 / 3]])).tolist()
    assert torch.equal(narrow, matrix.bfloat16())


def test_each_input_has_a_stack_of_its_own() -> None:
    inputs = tuple(torch.full((2, 2), value) for value in (1.0, 2.0, 4.0))
    outputs = [torch.empty(2, 2) for _ in range(2)]

    def weighted(numbers: list[int], stacks: list[Tensor]) -> Tensor:
        assert [tuple(stack.shape) for stack in stacks] == [(2, 2, 2)] * 3
        return stacks[0] + 10 * stacks[1] + 100 * stacks[2]

    WholeMatrices().apply([Job(inputs, output) for output in outputs], weighted)
    assert all(bool((output == 421).all()) for output in outputs)


def test_batches_are_of_one_shape_dtype_and_key() -> None:
    jobs = jobs_of((4, 4), (4, 2), (4, 4)) + jobs_of((4, 4), (4, 2), key="other")
    jobs.append(Job((torch.ones(4, 4).double(),), torch.empty(4, 4)))
    jobs.append(Job((torch.ones(4, 4),), torch.empty(4, 4).double()))
    jobs.append(Job((torch.ones(4, 4), torch.ones(4, 4)), torch.empty(4, 4)))
    assert sorted(batches_of(WholeMatrices(), jobs)) == [[0, 2], [1], [3], [4], [5], [6], [7]]


def test_a_batch_takes_half_a_bucket_or_one_job() -> None:
    """A job counts with all of its inputs."""
    jobs = jobs_of(*[(4, 4)] * 5)  # 64 bytes each
    assert batches_of(WholeMatrices(bucket_bytes=2 * 128), jobs) == [[0, 1], [2, 3], [4]]
    assert batches_of(WholeMatrices(bucket_bytes=1), jobs) == [[0], [1], [2], [3], [4]]
    pairs = [Job((torch.ones(4, 4), torch.ones(4, 4)), torch.empty(4, 4)) for _ in range(3)]
    assert batches_of(WholeMatrices(bucket_bytes=2 * 256), pairs) == [[0, 1], [2]]


def test_what_was_worked_on_is_counted() -> None:
    engine = WholeMatrices()
    engine.apply(jobs_of((4, 6), (3, 4, 6)), negated)
    engine.apply(jobs_of((5, 5)), negated)
    assert engine.num_matrices == 3, "a stack is one"
    assert engine.work == 4 * orthogonalization_cost((4, 6)) + orthogonalization_cost((5, 5))


def test_nothing_to_do() -> None:
    assert batches_of(WholeMatrices(), []) == []


def test_an_exception_comes_out_as_it_is() -> None:
    def fails(numbers: list[int], stacks: list[Tensor]) -> Tensor:
        raise KeyError(numbers[0])

    with pytest.raises(KeyError, match="0"):
        WholeMatrices().apply(jobs_of((2, 2)), fails)


def test_a_result_of_another_shape_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"\(1, 2, 3\) became \(2, 3\)"):
        WholeMatrices().apply(jobs_of((2, 3)), lambda numbers, stacks: stacks[0][0])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job((), torch.ones(2, 2)), "job 1 has no inputs"),
        (Job((torch.ones(2, 2),), torch.ones(2, 3)), "job 1: .*shape"),
        (Job((torch.ones(2, 2), torch.ones(2, 2).half()), torch.ones(2, 2)), "job 1: .*dtype"),
    ],
)
def test_jobs_that_do_not_fit_together_are_refused(job: Job, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WholeMatrices().apply([*jobs_of((2, 2)), job], negated)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        WholeMatrices(bucket_bytes=0)


def test_apply_to_whole_hands_a_plain_tensor_on() -> None:
    matrix = torch.ones(2, 3)
    assert apply_to_whole(matrix, lambda whole: whole) is matrix
