import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mtem.annealing import sample_labels, temperature

temperatures = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted)


@given(bounds=temperatures, steepness=st.floats(0, 60), total=st.integers(1, 5000))
@example(bounds=[1.0, 2.0], steepness=1e-310, total=10)
@example(bounds=[0.0, 0.0], steepness=0.0, total=1)
def test_ends_are_exact_and_it_only_falls(bounds: list[float], steepness: float, total: int) -> None:
    temperature_end, temperature_start = bounds
    assert temperature(0, total, temperature_start, temperature_end, steepness) == temperature_start
    assert temperature(total, total, temperature_start, temperature_end, steepness) == temperature_end
    assert temperature(3 * total, total, temperature_start, temperature_end, steepness) == temperature_end
    steps = sorted({0, total // 7, total // 3, total // 2, total - 1, total})
    values = [temperature(step, total, temperature_start, temperature_end, steepness) for step in steps]
    assert all(later <= earlier + 1e-14 for earlier, later in itertools.pairwise(values))


@pytest.mark.parametrize("steepness", [1.0, 5.0, 10.0])
def test_is_the_sigmoid_of_equation_15_up_to_its_rescaled_ends(steepness: float) -> None:
    for step in range(0, 101, 10):
        sigmoid = 1 / (1 + math.exp(-(steepness - 2 * steepness * step / 100)))
        end = 1 / (1 + math.exp(steepness))
        wanted = 0.2 + (3.0 - 0.2) * (sigmoid - end) / (1 - 2 * end)
        assert temperature(step, 100, 3.0, 0.2, steepness) == pytest.approx(wanted, abs=1e-12)
        if steepness == 10.0:  # steep enough for the printed equation, with the footnote's sigma, to reach its ends
            printed = 3.0 - (3.0 - 0.2) / (1 + math.exp(steepness - 2 * steepness * step / 100))
            assert temperature(step, 100, 3.0, 0.2, steepness) == pytest.approx(printed, abs=2e-4)


@pytest.mark.parametrize("steepness", [0.0, 1e-310, 1e-12, 1e-4])
def test_is_a_line_as_the_steepness_vanishes(steepness: float) -> None:
    for step in (0, 3, 5, 9):
        assert temperature(step, 10, 2.0, 1.0, steepness) == pytest.approx(2.0 - step / 10, abs=1e-8)


def test_no_steps_at_all() -> None:
    assert temperature(0, 0, 2.0, 0.5, 5.0) == 0.5


@pytest.mark.parametrize("arguments", [(0, 10, 1.0, 2.0, 5.0), (0, 10, 1.0, -0.1, 5.0), (0, 10, 2.0, 1.0, -1.0)])
def test_wrong_temperatures_are_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        temperature(*arguments)


@pytest.mark.parametrize("kappa", [0.3, 1.0, 4.0])
def test_frequencies_are_the_softmax_at_the_temperature(kappa: float) -> None:
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0])
    count = 200_000
    labels = sample_labels(scores.expand(count, 4), kappa, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(labels, minlength=4) / count
    wanted = torch.softmax(scores / kappa, dim=0)
    # Five standard deviations of a frequency.
    assert ((frequencies - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


def test_rows_have_their_own_draws_and_distributions() -> None:
    scores = torch.tensor([[50.0, 0.0, 0.0], [0.0, 50.0, 0.0], [0.0, 0.0, 50.0], [0.0, 0.0, 0.0]]).repeat(300, 1)
    labels = sample_labels(scores, 1.0, torch.Generator().manual_seed(1)).view(300, 4)
    assert (labels[:, :3] == torch.arange(3)).all()
    assert labels[:, 3].bincount(minlength=3).min() > 60


def test_inverts_the_cumulative_distribution_at_the_generators_uniform_numbers() -> None:
    scores = torch.log(torch.tensor([0.2, 0.5, 0.3])).expand(50, 3)
    draws = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).tolist()
    wanted = [0 if draw < 0.2 else 1 if draw < 0.7 else 2 for draw in draws]
    assert sample_labels(scores, 1.0, torch.Generator().manual_seed(7)).tolist() == wanted


def test_one_generator_state_is_one_draw() -> None:
    scores = torch.randn(400, 3, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    first, second = sample_labels(scores, 1.0, generator), sample_labels(scores, 1.0, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, sample_labels(scores, 1.0, torch.Generator().manual_seed(3)))
    before = torch.get_rng_state()
    sample_labels(scores, 1.0, generator)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(first, sample_labels(scores, 1.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_draw_the_same_labels() -> None:
    scores = torch.randn(5000, 4, generator=torch.Generator().manual_seed(2))
    on_cpu = sample_labels(scores, 0.7, torch.Generator().manual_seed(3))
    on_device = sample_labels(scores.cuda(), 0.7, torch.Generator().manual_seed(3))
    assert on_device.is_cuda
    assert torch.equal(on_cpu, on_device.cpu())


def test_greedy_and_temperature_zero_take_the_highest_score() -> None:
    scores = torch.randn(50, 4, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    assert torch.equal(sample_labels(scores, 5.0, generator, greedy=True), scores.argmax(1))
    assert torch.equal(sample_labels(scores, 0.0, generator), scores.argmax(1))
    assert torch.equal(before, generator.get_state())
    assert torch.equal(sample_labels(100 * scores, 1e-308, generator), scores.argmax(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_labels_are_in_range_whatever_the_scores(dtype: torch.dtype) -> None:
    rows = [[0.0, 0.0], [6e4, -6e4], [-6e4, 6e4], [-math.inf, 0.0], [0.0, -math.inf], [math.nan, 0.0], [math.inf, 0.0]]
    scores = torch.tensor(rows, dtype=dtype, requires_grad=True).repeat(200, 1)
    labels = sample_labels(scores, 0.5, torch.Generator().manual_seed(6))
    assert labels.dtype == torch.int64
    assert labels.shape == (1400,)
    assert not labels.requires_grad
    assert int(labels.min()) >= 0
    assert int(labels.max()) <= 1
    per_row = labels.view(200, 7)
    assert (per_row[:, 1] == 0).all()
    assert (per_row[:, 2] == 1).all()
    assert (per_row[:, 3] == 1).all()
    assert (per_row[:, 4] == 0).all()


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_extreme_draws_never_reach_a_class_of_probability_zero(draw: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, generator: torch.full(shape, draw, dtype=dtype))
    scores = torch.tensor([[-math.inf, 0.1, 0.7, 0.3, -math.inf]])
    assert sample_labels(scores, 1.0).item() == (1 if draw == 0 else 3)


def test_a_draw_that_rounds_to_one_stays_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    # As happens where a device has float32 only.
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, generator: torch.ones(shape, dtype=dtype))
    assert sample_labels(torch.zeros(2, 3), 1.0).tolist() == [2, 2]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits: expected shape \[N, K\] with K >= 1, got \[3\]"):
        sample_labels(torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="temperature: expected a number >= 0, got -1"):
        sample_labels(torch.zeros(3, 2), -1.0)
