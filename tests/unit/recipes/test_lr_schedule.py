import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from recipes.lr_schedule import learning_rate


def paper(step: int, base_lr: float = 0.00138, total_steps: int = 6775, warmup_steps: int = 677, **changes) -> float:
    settings = {"warmup_start_factor": 0.1, "decay_type": "cosine", "min_lr_factor": 0.1} | changes
    return learning_rate(step, base_lr=base_lr, total_steps=total_steps, warmup_steps=warmup_steps, **settings)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1.38e-4),
        (1, 1.398345643e-4),
        (676, 1.378165436e-3),
        (677, 1.38e-3),
        (3726, 7.59e-4),
        (6749, 1.380557092e-4),
    ],
)
def test_golden_values_of_the_178m_run(step, expected):
    assert paper(step) == pytest.approx(expected, rel=1e-9)


def test_equals_linear_warmup_then_cosine_annealing_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=20)
    cosine = CosineAnnealingLR(optimizer, T_max=180, eta_min=0.001)
    schedule = SequentialLR(optimizer, [warmup, cosine], milestones=[20])
    for step in range(200):
        assert paper(step, 0.01, 200, 20) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("decay_type", "half_way", "a_quarter"),
    [("cosine", 0.5, 0.853553390593), ("linear", 0.5, 0.75), ("sqrt", 0.292893218813, 0.5)],
)
def test_decay_types(decay_type, half_way, a_quarter):
    settings = {"total_steps": 110, "warmup_steps": 10, "decay_type": decay_type, "min_lr_factor": 0.2}
    assert paper(10, 1.0, **settings) == 1.0
    assert paper(60, 1.0, **settings) == pytest.approx(0.2 + 0.8 * half_way)
    assert paper(35, 1.0, **settings) == pytest.approx(0.2 + 0.8 * a_quarter)
    assert paper(110, 1.0, **settings) == pytest.approx(0.2)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "sqrt"])
def test_rises_to_the_end_of_the_warmup_and_falls_after_it(decay_type):
    rates = [paper(step, 1.0, 120, 12, decay_type=decay_type) for step in range(121)]
    assert rates[:13] == sorted(rates[:13])
    assert rates[12:] == sorted(rates[12:], reverse=True)
    assert len(set(rates)) > 100


def test_stays_at_the_minimum_after_the_last_step():
    assert paper(120, 1.0, 120, 12) == paper(1000, 1.0, 120, 12) == pytest.approx(0.1)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert paper(0, 1.0, 120, 0) == 1.0


def test_warmup_that_lasts_the_whole_run():
    assert paper(99, 1.0, 100, 100) == pytest.approx(0.991)
    assert paper(100, 1.0, 100, 100) == pytest.approx(0.1)


def test_an_unknown_decay_type_is_refused():
    with pytest.raises(ValueError, match="use cosine, linear or sqrt"):
        paper(50, 1.0, 100, 10, decay_type="step")
