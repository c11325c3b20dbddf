import pytest
import torch

from automodel.data.collate import IGNORE_INDEX, default_collater


def test_equal_samples_are_stacked_and_get_no_mask():
    samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([2, 3])} for _ in range(3)]
    batch = default_collater(samples)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[1, 2]] * 3
    assert batch["labels"].tolist() == [[2, 3]] * 3


def test_lists_of_ints_become_int64():
    batch = default_collater([{"input_ids": [1, 2], "labels": [2, IGNORE_INDEX]}])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["labels"].tolist() == [[2, -100]]


@pytest.mark.parametrize("convert", [list, torch.tensor])
def test_ragged_samples_are_padded_on_the_right(convert):
    samples = [
        {"input_ids": convert([5, 6, 7]), "labels": convert([6, 7, 8])},
        {"input_ids": convert([9]), "labels": convert([4])},
    ]
    batch = default_collater(samples, pad_token_id=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 3, 3]]
    assert batch["labels"].tolist() == [[6, 7, 8], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64


def test_pad_token_is_zero_by_default():
    assert default_collater([{"input_ids": [5, 6]}, {"input_ids": [7]}])["input_ids"].tolist() == [[5, 6], [7, 0]]


def test_empty_sequence_is_all_padding():
    batch = default_collater([{"input_ids": [], "labels": []}, {"input_ids": [7], "labels": [1]}])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[0], [1]]
    assert batch["labels"].tolist() == [[-100], [1]]


def test_given_masks_are_kept_and_padded_with_zero():
    samples = [{"input_ids": [5, 6], "attention_mask": [0, 1]}, {"input_ids": [7], "attention_mask": [1]}]
    assert default_collater(samples)["attention_mask"].tolist() == [[0, 1], [1, 0]]


def test_other_entries_are_stacked():
    batch = default_collater([{"input_ids": [1], "weight": 0.5, "image": torch.ones(2, 3)}] * 2)
    assert batch["weight"].tolist() == [0.5, 0.5]
    assert batch["image"].shape == (2, 2, 3)


def test_result_shares_no_memory_with_the_samples():
    sample = {"input_ids": torch.tensor([1, 2])}
    default_collater([sample])["input_ids"].fill_(9)
    assert sample["input_ids"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample"),
        ([{"input_ids": [1]}, {"labels": [1]}], r"sample 1 has the keys \['labels'\]"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            "sample 0 has input_ids, labels or attention_mask of different lengths",
        ),
        ([{"input_ids": [1], "extra": [1]}, {"input_ids": [2], "extra": [1, 2]}], "extra differs in shape"),
        ([{"input_ids": [1], "name": "a"}], "name cannot be made a tensor"),
        ([{"input_ids": [[1], [2, 3]]}], "input_ids cannot be made a tensor"),
        ([{"labels": [[1]]}, {"labels": [1]}], "labels differs in shape"),
    ],
)
def test_mistakes_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        default_collater(samples)
