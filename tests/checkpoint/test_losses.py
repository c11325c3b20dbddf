"""losses.json: written, read, and replaced in one step."""

import errno

import pytest

from automodel.checkpoint.directories import LOWEST_VAL, MANIFEST, read_checkpoint_pointer
from automodel.checkpoint.losses import LOSSES, follow_lowest, read_losses, replace_losses, write_losses


def complete(root, step, losses):
    directory = root / f"epoch_0_step_{step}"
    directory.mkdir()
    (directory / MANIFEST).write_text("{}")
    write_losses(losses, directory)
    return directory


def test_what_is_written_or_replaced_is_read(tmp_path):
    directory = complete(tmp_path, 1, {"val_loss": 1.5})
    assert read_losses(directory) == {"val_loss": 1.5}
    replace_losses({"train_loss": 2.0}, directory)
    assert read_losses(directory) == {"train_loss": 2.0}
    assert sorted(path.name for path in directory.iterdir()) == [MANIFEST, LOSSES]


def test_a_replacement_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / LOSSES).mkdir()
    (tmp_path / LOSSES / "file").touch()
    with pytest.raises(OSError, match=LOSSES) as error:
        replace_losses({"val_loss": 1.0}, tmp_path)
    assert error.value.errno in {errno.EISDIR, errno.ENOTEMPTY}
    assert [path.name for path in tmp_path.iterdir()] == [LOSSES]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"val_loss": "1"}', '{"val_loss": null}', "\xff"])
def test_what_cannot_be_read_is_unknown_with_a_warning(tmp_path, caplog, text):
    (tmp_path / LOSSES).write_text(text, encoding="latin-1")
    assert read_losses(tmp_path) == {}
    assert f"{tmp_path / LOSSES} cannot be read" in caplog.text


def test_the_pointer_stays_with_a_checkpoint_that_is_as_good(tmp_path):
    first, equal, better = (
        complete(tmp_path, step, {"val_loss": loss}) for step, loss in ((1, 2.0), (2, 2.0), (3, 1.0))
    )
    for checkpoint, expected in ((first, first), (equal, first), (better, better), (first, better)):
        follow_lowest(checkpoint, read_losses(checkpoint), key="val_loss")
        assert read_checkpoint_pointer(tmp_path, LOWEST_VAL) == expected
