"""Causal language models and their configurations, from transformers, read at one commit of their repository.

`NeMoAutoModelForCausalLM` and `NeMoAutoConfig` are the names that recipes use. Both find out once which commit of a
Hub repository a load selects (`automodel.models.commit`) and read everything else at that commit.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from automodel.models.commit import hub_options
from automodel.models.config_overrides import known_names, refuse_misspelt, report_unknown
from automodel.models.dtypes import parse_dtype
from automodel.models.resolution import ConfigSource, as_config, config_for_weights, load_config, set_for_training

__all__ = [
    "NeMoAutoConfig",
    "NeMoAutoModelForCausalLM",
    "build_on_meta",
    "is_transformers_class",
    "quiet_kernel_fallbacks",
]

logger = logging.getLogger(__name__)


class NeMoAutoConfig:
    """Model configurations, read at the commit that the Hub download selected."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        proxies: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        code_revision: str | None = None,
        return_unused_kwargs: bool = False,
        **overrides: Any,
    ) -> Any:
        """Read the configuration of a model.

        A Hub repository is asked, with its ordinary freshness check, for the commit that `revision` stands for; the
        configuration is read at that commit and keeps it as `_commit_hash`. Local folders and files are read as is.

        Args:
            pretrained_model_name_or_path: A Hub repository, a local folder or a local configuration file.
            revision: Branch, tag or commit. A full commit hash makes separate jobs read the same version.
            cache_dir: The download cache.
            subfolder: The folder of the repository that holds the file.
            token: The access token.
            local_files_only: Read the cache and never ask the Hub.
            force_download: Download again what the cache holds.
            proxies: Proxy servers by protocol.
            trust_remote_code: Run configuration classes that the repository brings.
            code_revision: The revision of that code, where it lives in another repository.
            return_unused_kwargs: Return the pair of the configuration and the overrides that it does not know.
            **overrides: Configuration keys to change, such as `n_layer=6`.

        Returns:
            The transformers configuration, or the pair that `return_unused_kwargs` asks for.

        Raises:
            OSError: the repository, the revision or the file cannot be found.
            ValueError: an override is a known key misspelt, or the repository needs `trust_remote_code`.
        """
        hub = hub_options(
            revision=revision,
            cache_dir=cache_dir,
            subfolder=subfolder,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            proxies=proxies,
        )
        config, unused = load_config(
            pretrained_model_name_or_path,
            hub=hub,
            code={"trust_remote_code": trust_remote_code, "code_revision": code_revision},
            overrides=overrides,
        )
        if return_unused_kwargs:
            return config, unused
        report_unknown(unused, known=known_names(config))
        return config


class NeMoAutoModelForCausalLM:
    """Causal language models from transformers, ready to train: in training mode, without a generation cache."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        config: ConfigSource | None = None,
        torch_dtype: str | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        text_config: Mapping[str, Any] | None = None,
        output_hidden_states: bool | None = None,
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        proxies: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        code_revision: str | None = None,
        use_liger_kernel: bool | None = None,
        use_sdpa_patching: bool | None = None,
        force_hf: bool | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a pretrained model; its configuration and its weights come from the same commit.

        Under `torch.device("meta")` no weights are read: the result has the shapes and dtypes only.

        Args:
            pretrained_model_name_or_path: A Hub repository or a local folder.
            config: The configuration to use instead of the repository's; one that `NeMoAutoConfig` read from this
                repository also decides the commit of the weights. It is not changed.
            torch_dtype: dtype of the parameters, also by name; None and "auto" take the checkpoint's.
            dtype: The newer name of `torch_dtype`.
            attn_implementation: "eager", "sdpa", "flash_attention_2", ...
            text_config: Configuration keys of the language model, which may be a part of a larger one.
            output_hidden_states: Make the model return the hidden states of every layer.
            revision, cache_dir, subfolder, token, local_files_only, force_download, proxies, trust_remote_code,
                code_revision: As in `NeMoAutoConfig.from_pretrained`.
            use_liger_kernel, use_sdpa_patching, force_hf, backend: Accepted for existing recipes: the log says what
                each means here, where models are always the unpatched ones of transformers.
            **kwargs: Configuration keys to change, and further options of transformers' `from_pretrained`.

        Returns:
            The model, in training mode; with `output_loading_info=True` the pair that transformers returns.

        Raises:
            OSError: the repository, the revision or a file cannot be found.
            ValueError: a bad dtype, a misspelt configuration key, or a `revision` that contradicts `config`.
        """
        parameter_dtype = _one_dtype(torch_dtype, dtype)
        _explain_unused_options(use_liger_kernel, use_sdpa_patching, force_hf, backend)
        hub = hub_options(
            revision=revision,
            cache_dir=cache_dir,
            subfolder=subfolder,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            proxies=proxies,
        )
        code = {"trust_remote_code": trust_remote_code, "code_revision": code_revision}
        resolved, commit, options = config_for_weights(
            pretrained_model_name_or_path, config=config, hub=hub, code=code, overrides=kwargs
        )
        set_for_training(resolved, kwargs, text_config, output_hidden_states)
        if torch.get_default_device().type == "meta":
            built = _build(resolved, dtype=parameter_dtype, attn_implementation=attn_implementation, code=code)
            return _with_loaded_dtypes(built)
        if commit is not None:
            hub["revision"] = commit
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        loaded = AutoModelForCausalLM.from_pretrained(
            pretrained_model_name_or_path,
            config=resolved,
            dtype="auto" if parameter_dtype is None else parameter_dtype,
            **hub,
            **code,
            **options,
        )
        model: PreTrainedModel = loaded[0] if isinstance(loaded, tuple) else loaded
        model.train()
        return cast("PreTrainedModel", loaded)

    @classmethod
    def from_config(
        cls,
        config: ConfigSource,
        *,
        torch_dtype: str | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        text_config: Mapping[str, Any] | None = None,
        output_hidden_states: bool | None = None,
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        proxies: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        code_revision: str | None = None,
        use_liger_kernel: bool | None = None,
        use_sdpa_patching: bool | None = None,
        force_hf: bool | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Build a model with fresh weights from a configuration.

        Args:
            config: A transformers configuration (not changed), a mapping with `model_type` and its keys, or the Hub
                repository, folder or file that `NeMoAutoConfig` then reads with the options below.
            torch_dtype: dtype of the parameters, also by name; None and "auto" take the configuration's, or float32.
            dtype: The newer name of `torch_dtype`.
            attn_implementation: "eager", "sdpa", "flash_attention_2", ...
            text_config: Configuration keys of the language model, which may be a part of a larger one.
            output_hidden_states: Make the model return the hidden states of every layer.
            revision, cache_dir, subfolder, token, local_files_only, force_download, proxies, trust_remote_code,
                code_revision: As in `NeMoAutoConfig.from_pretrained`.
            use_liger_kernel, use_sdpa_patching, force_hf, backend: Accepted for existing recipes: the log says what
                each means here, where models are always the unpatched ones of transformers.
            **kwargs: Configuration keys to change, and further arguments of the model class.

        Returns:
            The model, in training mode, on the default device.

        Raises:
            OSError: a repository, revision or file cannot be found.
            ValueError: a bad dtype, an unknown `model_type` or a misspelt configuration key.
        """
        parameter_dtype = _one_dtype(torch_dtype, dtype)
        _explain_unused_options(use_liger_kernel, use_sdpa_patching, force_hf, backend)
        code = {"trust_remote_code": trust_remote_code, "code_revision": code_revision}
        hub = hub_options(
            revision=revision,
            cache_dir=cache_dir,
            subfolder=subfolder,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            proxies=proxies,
        )
        if revision is not None and not isinstance(config, str | PathLike):
            logger.warning("revision=%s has no effect: the configuration is given and not read from the Hub", revision)
        resolved, options = as_config(config, hub=hub, code=code, overrides=kwargs)
        refuse_misspelt(options, known=known_names(resolved))
        set_for_training(resolved, kwargs, text_config, output_hidden_states)
        return _build(resolved, dtype=parameter_dtype, attn_implementation=attn_implementation, code=code, **options)


def build_on_meta(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a model factory so that the model has shapes and dtypes but no memory, and no weights are read.

    Args:
        factory: A class method of `NeMoAutoModelForCausalLM`, `from_pretrained` of a transformers class, or any
            callable that builds a module.
        arguments: Its keyword arguments.

    Returns:
        What the factory returns, on torch's meta device.
    """
    owner = getattr(factory, "__self__", None)
    with torch.device("meta"), quiet_kernel_fallbacks():
        # transformers refuses to load weights onto the meta device; our own class method reads none there.
        if getattr(factory, "__name__", "") == "from_pretrained" and is_transformers_class(owner):
            return _upstream_on_meta(owner, **arguments)
        return factory(**arguments)


@contextmanager
def quiet_kernel_fallbacks() -> Iterator[None]:
    """Silence transformers' advice to install mamba_ssm, causal_conv1d or flash-linear-attention.

    transformers gives it once per process and kernel, when a hybrid layer first runs on its torch path. Those packages
    need a GPU: on a CPU, and where only shapes are computed, the advice cannot be followed. Elsewhere it stays.
    """
    source = logging.getLogger("transformers.integrations.hub_kernels")
    source.addFilter(_is_no_fallback_advice)
    try:
        yield
    finally:
        source.removeFilter(_is_no_fallback_advice)


def _is_no_fallback_advice(record: logging.LogRecord) -> bool:
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def _build(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    attn_implementation: str | None,
    code: Mapping[str, Any],
    **options: Any,
) -> PreTrainedModel:
    """Build a model with fresh weights on the default device."""
    if dtype is not None:
        options["dtype"] = dtype
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if code["trust_remote_code"] and _brings_its_class(config):
        # The class is read from the repository now: at the commit of the configuration, unless it lives elsewhere.
        own_code = "--" not in config.auto_map["AutoModelForCausalLM"]
        commit = getattr(config, "_commit_hash", None) if own_code else None
        options["code_revision"] = code["code_revision"] or commit
    from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    return from_config(config, trust_remote_code=code["trust_remote_code"], **options)


def _brings_its_class(config: PreTrainedConfig) -> bool:
    """Whether transformers would take the model class from the repository's own code."""
    if "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        return False
    registered = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    first = registered[0] if isinstance(registered, tuple) else registered
    # A class that was registered from outside, perhaps by an earlier load of this repository, wins over its code.
    return first is None or first.__module__.startswith("transformers.")


def is_transformers_class(owner: object) -> bool:
    """Whether `owner` is a class of transformers, or a model class that is built on its own."""
    return isinstance(owner, type) and (
        issubclass(owner, PreTrainedModel) or owner.__module__.partition(".")[0] == "transformers"
    )


def _upstream_on_meta(owner: Any, pretrained_model_name_or_path: str | PathLike[str], **arguments: Any) -> Any:
    """Build what `owner.from_pretrained` of transformers would load, from the configuration alone."""
    chosen = [arguments.pop(name, None) for name in ("dtype", "torch_dtype")]
    dtype = _one_dtype(*chosen)
    config = arguments.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **arguments)
    options: dict[str, Any] = {"dtype": dtype or config.dtype or torch.float32}
    if arguments.get("attn_implementation") is not None:
        options["attn_implementation"] = arguments["attn_implementation"]
    if issubclass(owner, PreTrainedModel):
        built = owner._from_config(copy.deepcopy(config), **options)
    else:
        trust = arguments.get("trust_remote_code")
        built = owner.from_config(copy.deepcopy(config), trust_remote_code=trust, **options)
    return _with_loaded_dtypes(built)


def _with_loaded_dtypes(model: PreTrainedModel) -> PreTrainedModel:
    """Make float32, in place, what transformers keeps in float32 when it loads a checkpoint, such as routers."""
    patterns = [glob.replace("*", ".*") for glob in model._get_dtype_plan(model.dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.float()
    return model


def _one_dtype(torch_dtype: str | torch.dtype | None, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read the two names of one option.

    Raises:
        ValueError: one is no dtype, or they differ.
    """
    old, new = parse_dtype(torch_dtype, name="torch_dtype"), parse_dtype(dtype, name="dtype")
    if torch_dtype is not None and dtype is not None and old != new:
        raise ValueError(f"torch_dtype={torch_dtype!r} and dtype={dtype!r} name the same option and differ")
    return new if dtype is not None else old


def _explain_unused_options(
    use_liger_kernel: bool | None, use_sdpa_patching: bool | None, force_hf: bool | None, backend: object
) -> None:
    """Say once what options of the reference system mean here, where they ask for something that it would do."""
    if use_liger_kernel:
        logger.warning("use_liger_kernel has no effect: the model keeps the modules of transformers")
    if use_sdpa_patching:
        logger.warning("use_sdpa_patching has no effect: attn_implementation chooses the attention")
    if force_hf:
        logger.info("force_hf changes nothing: models are always the ones of transformers")
    if backend is not None:
        logger.warning("backend has no effect: it chooses kernels of custom models, and models come from transformers")
