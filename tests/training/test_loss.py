import pytest
import torch

from automodel.training.loss import IGNORE_INDEX, MaskedCrossEntropy


def oracle(logits, labels, *, ignore_index=IGNORE_INDEX):
    """Sum of token losses and its gradient with respect to the logits, in float64 and written out."""
    logits = logits.double()
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    total, gradient = 0.0, torch.zeros_like(logits)
    for row in range(labels.shape[0]):
        for column in range(labels.shape[1]):
            label = int(labels[row, column])
            if label != ignore_index:
                total -= float(probabilities[row, column, label].log())
                gradient[row, column] = probabilities[row, column]
                gradient[row, column, label] -= 1
    return total, gradient


def make(batch=3, length=5, vocab=11, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, length, vocab, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels = torch.randint(vocab, (batch, length), generator=generator)
    labels[0, 2:] = IGNORE_INDEX
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("count", [None, 40])
def test_value_and_gradient(count):
    logits, labels = make()
    total, gradient = oracle(logits.detach(), labels)
    divisor = count or 12
    loss = MaskedCrossEntropy()(logits, labels, num_label_tokens=count)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(total / divisor, dtype=torch.float32))
    torch.testing.assert_close(logits.grad, (gradient / divisor).float())
    assert torch.all(logits.grad[0, 2:] == 0)


def test_16_bit_logits_are_reduced_in_fp32():
    logits, labels = make(vocab=64, dtype=torch.bfloat16)
    loss = MaskedCrossEntropy()(logits, labels)
    assert loss.dtype == torch.float32
    total, _ = oracle(logits.detach(), labels)
    torch.testing.assert_close(loss, torch.tensor(total / 12, dtype=torch.float32))
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_without_the_upcast_the_dtype_of_the_logits_stays():
    logits, labels = make(dtype=torch.float64)
    loss = MaskedCrossEntropy(fp32_upcast=False)(logits, labels)
    total, _ = oracle(logits.detach(), labels)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, torch.tensor(total / 12, dtype=torch.float64))


@pytest.mark.parametrize("count", [None, 0, 7])
def test_a_batch_without_label_tokens_gives_zero(count):
    logits, labels = make()
    loss = MaskedCrossEntropy()(logits, torch.full_like(labels, IGNORE_INDEX), num_label_tokens=count)
    loss.backward()
    assert loss == 0
    assert torch.all(logits.grad == 0)


def test_an_empty_batch_gives_zero():
    assert MaskedCrossEntropy()(torch.zeros(0, 5, 11), torch.zeros(0, 5, dtype=torch.int64)) == 0


def test_another_ignore_index():
    logits, labels = make()
    labels = labels.masked_fill(labels == IGNORE_INDEX, 0)
    total, _ = oracle(logits.detach(), labels, ignore_index=0)
    loss = MaskedCrossEntropy(ignore_index=0)(logits, labels)
    torch.testing.assert_close(loss, torch.tensor(total / int((labels != 0).sum()), dtype=torch.float32))


def test_micro_batches_add_up_to_the_mean_over_all_tokens():
    logits, labels = make(batch=4, dtype=torch.float64)
    loss_fn = MaskedCrossEntropy(fp32_upcast=False)
    whole = loss_fn(logits, labels)
    (gradient,) = torch.autograd.grad(whole, logits)
    # The parts have different numbers of label tokens: means of the parts would not add up.
    count = int((labels != IGNORE_INDEX).sum())
    parts = sum(loss_fn(logits[i : i + 1], labels[i : i + 1], num_label_tokens=count) for i in range(4))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, logits)[0], gradient)


def test_non_contiguous_logits():
    logits, labels = make()
    strided = logits.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert MaskedCrossEntropy()(strided, labels) == MaskedCrossEntropy()(logits.detach(), labels)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows(bad):
    logits, labels = make()
    broken = logits.detach().clone()
    broken[1, 1, 0] = bad
    assert not torch.isfinite(MaskedCrossEntropy()(broken, labels))
