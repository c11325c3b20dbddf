"""The safetensors files of a pretrained model: which they are, what they hold, and how its names map to the model's."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, cached_files

from automodel.models.safetensors_files import StoredTensor, read_header, read_index

if TYPE_CHECKING:
    import torch

__all__ = ["model_names", "read_checkpoint"]


def read_checkpoint(
    name_or_path: str | PathLike[str], *, variant: str | None, hub: Mapping[str, Any]
) -> dict[str, StoredTensor] | None:
    """Find a model's safetensors files as transformers does, a single file or those of an index; read what they hold.

    Args:
        name_or_path: A local folder or a Hub repository; missing files are downloaded.
        variant: Part of the file names, such as "fp16".
        hub: The download options: revision, cache_dir, subfolder, token, local_files_only, force_download, proxies.

    Returns:
        The tensors by their names in the files; None where there are no such files.

    Raises:
        OSError: the repository or a file of the index cannot be found.
        ValueError: a file is damaged or not complete, or lacks a tensor that the index promises.
    """
    repository = _Repository(name_or_path, hub)
    single = repository.find(_with_variant(SAFE_WEIGHTS_NAME, variant))
    if single is not None:
        return read_header(single)
    index = repository.find(_with_variant(SAFE_WEIGHTS_INDEX_NAME, variant))
    if index is None:
        return None
    weight_map = read_index(index)
    files = repository.get(sorted(set(weight_map.values())), index=index)
    headers = {name: read_header(file) for name, file in files.items()}
    for key, name in weight_map.items():
        if key not in headers[name]:
            raise ValueError(f"{files[name]} lacks {key}, which {index} says it holds")
    return {key: tensor for header in headers.values() for key, tensor in header.items()}


def model_names(keys: Sequence[str], template: PreTrainedModel) -> dict[str, str] | None:
    """Find the model's name for each key of a checkpoint, as transformers does: older names, with or without prefix.

    Args:
        keys: The names in the files.
        template: The model.

    Returns:
        The name in the model's state dict, or one that it does not have, by key; None where a tensor of the model has
        to be computed from those of the files.
    """
    transforms = get_model_conversion_mapping(template)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state: dict[str, torch.Tensor] = template.state_dict()
    prefix = template.base_model_prefix
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key in keys:
        name, converted = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, converted = rename_source_key(key, [], [], prefix, state)
        if name in state and (converted is not None or name in taken):
            return None
        taken.add(name)
        names[key] = name
    return names


class _Repository:
    """A local folder or a Hub repository."""

    def __init__(self, name_or_path: str | PathLike[str], hub: Mapping[str, Any]) -> None:
        self._name, self._hub = name_or_path, hub
        is_folder = Path(name_or_path).is_dir()
        self._folder = Path(name_or_path) / (hub.get("subfolder") or "") if is_folder else None

    def find(self, filename: str) -> Path | None:
        """One file, or None where it does not exist."""
        if self._folder is not None:
            return self._folder / filename if (self._folder / filename).is_file() else None
        found = cached_file(self._name, filename, _raise_exceptions_for_missing_entries=False, **self._hub)
        return None if found is None else Path(found)

    def get(self, filenames: list[str], *, index: Path) -> dict[str, Path]:
        """Several files, all of which an index names."""
        if self._folder is None:
            found = [Path(file) for file in cached_files(self._name, filenames, **self._hub) or ()]
        else:
            found = [self._folder / filename for filename in filenames]
        for file in found:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing: {index} names it")
        return dict(zip(filenames, found, strict=True))


def _with_variant(filename: str, variant: str | None) -> str:
    stem, _, suffix = filename.rpartition(".")
    return filename if variant is None else f"{stem}.{variant}.{suffix}"
