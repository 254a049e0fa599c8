"""Saving and loading with transformers: the quantization config, the quantizer, and what ties them to a model.

``config.json`` carries everything that ``from_pretrained`` needs to rebuild the modules before their weights load: one
spec for each module of ours, whether the head was untied, which token ids are visual, and the record of the rewrites.
Importing this module registers the quantizer; ``mmqc.checkpoint.hf_hook`` does that when transformers is imported.

The tensors themselves are plain safetensors; each is saved with its SHA-256 and checked against it after loading.  The rest
of config.json, and generation_config.json, are signed (``mmqc.checkpoint.signature``).
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmqc.checkpoint import hf_staged  # noqa: F401  (wraps functions of transformers)
from mmqc.checkpoint.checksum import CheckpointError, check_set, inventory, verify
from mmqc.checkpoint.field_types import check_fields
from mmqc.checkpoint.files import CONFIG, GENERATION, read_json
from mmqc.checkpoint.hf_load import LoadPlan, QuantizeOnLoad
from mmqc.checkpoint.hf_signed import signing
from mmqc.checkpoint.method_name import METHOD, REQUIRES
from mmqc.checkpoint.module_spec import build_module, dtype_name, dtype_of, module_spec
from mmqc.checkpoint.parallel import hf_parallel
from mmqc.checkpoint.signature import SIGNED, check_config, check_generation
from mmqc.checkpoint.skeleton.tensor_names import come_back
from mmqc.checkpoint.skeleton.untie import forget_ties, untie
from mmqc.config import QuantConfig
from mmqc.experts.modules import QuantExperts
from mmqc.kv import query_moment
from mmqc.kv import rounding as kv_rounding
from mmqc.nn.adapted_linear import BASE, AdaptedLinear
from mmqc.nn.inside import watch
from mmqc.nn.integer_weight import CODES, SCALES
from mmqc.nn.linear import QuantLinear, rebuild_factors
from mmqc.nn.modality import ModalityContext, attached
from mmqc.nn.unseen import guard
from mmqc.report.report import plain

__all__ = ["MmqcConfig", "MmqcQuantizer", "attach_config", "build_module", "module_spec"]

VERSION = SIGNED  # 1: without a signature, as older mmqc wrote it
logger = logging.getLogger(__name__)


class MmqcConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model that mmqc quantized.

    Attributes:
        version: of this layout.
        config: ``QuantConfig.to_dict()``; a QuantConfig is accepted too.
        modules: the spec of every module of ours, by FQN.
        parameters: parameters that the model has and its class does not build, or builds otherwise: shape and dtype
            by FQN, None for one that is gone.
        dtype: of the model's floating-point parameters when it was saved.
        untied: whether the output head was separated from the input embedding.
        visual_token_ids: ids that stand for visual tokens; None for a model that does not tell modalities apart.
        record: what the rewrites did, for ``mmqc.explain``.
        hashes: "dtype:sha256" by tensor name, of every tensor of the model; "offloaded" where it was not in memory.
        own_names: whether the files have the model's own names for its tensors (``mmqc.checkpoint.skeleton.tensor_names``).

    ``modules_to_not_convert``, which transformers' own quantizers take, adds to the config's ``keep``.
    """

    def __init__(
        self,
        version: int = VERSION,
        config: Mapping[str, Any] | QuantConfig | None = None,
        modules: Mapping[str, dict[str, Any]] | None = None,
        parameters: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        untied: bool = False,
        visual_token_ids: Iterable[int] | None = None,
        record: Mapping[str, Any] | None = None,
        hashes: Mapping[str, str] | None = None,
        own_names: bool = False,
        modules_to_not_convert: Iterable[str] | None = None,
        quant_method: str | None = METHOD,
        requires: str = REQUIRES,
        signature: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if isinstance(version, bool) or version not in (1, VERSION):
            raise CheckpointError(
                f"quantization_config.version = {version!r}, but this mmqc reads versions 1 and {VERSION}; "
                f"load the model with the mmqc that saved it, or update mmqc"
            )
        if unknown:
            raise CheckpointError(f"quantization_config has an unknown key {sorted(unknown)[0]!r}; was it edited by hand?")
        given = config.to_dict() if isinstance(config, QuantConfig) else config
        parts = {"config": given, "modules": modules, "parameters": parameters, "dtype": dtype, "untied": untied}
        parts |= {"visual_token_ids": visual_token_ids, "record": record, "hashes": hashes, "own_names": own_names}
        check_fields(parts)
        self.quant_method: Any = quant_method or METHOD
        self.version = version
        self.config = dict(given or QuantConfig().to_dict())
        if modules_to_not_convert:
            self.config["keep"] = list(dict.fromkeys((*self.quant_config.keep, *modules_to_not_convert)))
        self.modules = dict(modules or {})
        self.parameters = dict(parameters or {})
        self.dtype = dtype
        self.untied = untied
        self.visual_token_ids = None if visual_token_ids is None else list(visual_token_ids)
        self.record = dict(record or {})
        self.hashes = dict(hashes or {})
        self.own_names = own_names

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it: no method's name, which transformers without mmqc refuses, and no times, which differ."""
        record = dict(self.record)
        if "passes" in record:
            record["passes"] = [{k: v for k, v in entry.items() if k != "ms"} for entry in record["passes"]]
        found = {**super().to_dict(), "quant_method": None, "requires": REQUIRES, "record": record}
        if not self.own_names:
            del found["own_names"]  # which older mmqc does not know
        return found

    @property
    def quant_config(self) -> QuantConfig:
        """The recipe as a value."""
        return QuantConfig.from_dict(self.config)


class MmqcQuantizer(HfQuantizer):
    """Rebuilds mmqc's modules before the weights load and checks the weights after; or quantizes a float checkpoint.

    Raises:
        ConfigError: a float checkpoint and a config that needs data, or rewrites.
    """

    quantization_config: MmqcConfig
    stages_saves = True

    def __init__(self, quantization_config: MmqcConfig | QuantConfig, **kwargs: Any) -> None:
        if isinstance(quantization_config, QuantConfig):
            quantization_config = MmqcConfig(config=quantization_config)
        super().__init__(quantization_config, **kwargs)
        self._dtype = torch.float32
        self._asked: torch.dtype | None = None
        self._plan = None if self.pre_quantized else LoadPlan(quantization_config.quant_config)
        self._directory: Path | None = None  # that is loaded from
        self._raw: dict[str, Any] = {}  # its config.json
        self._keys: Any = None  # what transformers found missing and unexpected there

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Always: the state dict is plain tensors."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With adapters: codes stay as they are, and gradients go through them to what lies in front."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Lets ``generate`` compile by itself, as it does for float models."""
        return True

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether this weight of a float checkpoint is quantized as it loads."""
        return self._plan is not None and self._plan.wanted(param_name)

    def get_quantize_ops(self) -> QuantizeOnLoad:
        """What transformers applies to such a weight."""
        assert self._plan is not None
        return QuantizeOnLoad(self._plan)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Any) -> float:
        """Bytes per element once loaded, for ``device_map="auto"``."""
        return self._plan.element_size(param_name, param.element_size()) if self._plan else param.element_size()

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[Any, dict[str, Any]]:
        """The state dict as it is; transformers asks for it before it writes config.json, which is completed here."""
        if hf_parallel.is_split(model):
            raise hf_parallel.SplitError("this rank has a part of the model only: load it without tp_plan to save it again")
        state = model.state_dict()
        config = self.quantization_config
        config.version = VERSION
        config.modules = {name: spec for name, module in model.named_modules() if (spec := module_spec(module))}
        config.dtype = dtype_name(float_dtype(model))
        config.parameters = self.differences(model)
        config.hashes = inventory(state)
        return state, {}

    def renames(self, model: PreTrainedModel, asked: bool = True) -> bool:
        """Whether a save writes the names of the family's checkpoints, as is ``asked`` for; config.json will say if not."""
        names = set(model.state_dict()) - set(model.all_tied_weights_keys)
        fqns = {name for name, module in model.named_modules() if module_spec(module)}
        ours = {name for name in names if any(fqn in fqns for fqn in _above(name))}
        self.quantization_config.own_names = not (asked and come_back(model, names, ours))
        return not self.quantization_config.own_names

    def update_weight_conversions(self, weight_conversions: list[Any], *more: Any) -> list[Any]:
        """None for files that have the model's own names; ``more``: the model, which newer versions of transformers give."""
        return [] if self.quantization_config.own_names else super().update_weight_conversions(weight_conversions, *more)

    def seal(self, directory: Path) -> None:
        """What is left to do in a directory that was just written: nothing, config.json is signed as it is written."""

    def differences(self, model: PreTrainedModel) -> dict[str, Any]:
        """The parameters in which ``model`` differs from what its class builds and the specs complete."""
        self.quantization_config.parameters = {}
        with model_init(type(model), float_dtype(model)):
            skeleton = type(model)(model.config)
        rebuild(skeleton, self.quantization_config, float_dtype(model))
        built, here = (dict(m.named_parameters(remove_duplicate=False)) for m in (skeleton, model))
        changed: dict[str, Any] = {
            name: {"shape": list(p.shape), "dtype": dtype_name(p.dtype)}
            for name, p in here.items()
            if name not in built or built[name].shape != p.shape or built[name].dtype != p.dtype
        }
        changed |= {name: None for name in built if name not in here}
        there, ours = (set(m.state_dict()) - set(changed) for m in (skeleton, model))
        if there != ours:
            name = sorted(there ^ ours)[0]
            raise ValueError(
                f"from_pretrained could not rebuild this model: {type(model).__name__} builds "
                f"{'a buffer' if name in there else 'no buffer'} {name}, and no module of mmqc accounts for the "
                f"difference; undo what was done to the model by hand before saving it"
            )
        return changed

    def preprocess_model(self, model: PreTrainedModel, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        """As transformers', whose newer versions say the dtype here; to 5.17 it is the default one meanwhile."""
        self._asked = dtype
        parent: Any = super()
        return parent.preprocess_model(model, **({} if dtype is None else {"dtype": dtype}), **kwargs)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._dtype = self._asked or torch.get_default_dtype()
        if self._plan is not None:
            if hf_parallel.ranks_of(model) > 1:
                raise hf_parallel.SplitError(
                    "a float checkpoint is not quantized while ranks share it: quantize it, save it, and load that with tp_plan"
                )
            self._plan.prepare(model)
            return
        files: Sequence[str] = kwargs.get("checkpoint_files") or ()
        if files:
            self._directory = Path(files[0]).parent
            self._raw = self._checked_config()
            check_generation(self._raw, self._directory, required=False)
            self._listen(model)
        with default_dtype(self._dtype):  # newer versions of transformers set it back before they come here
            rebuild(model, self.quantization_config, self._dtype)
        if self.quantization_config.untied:
            forget_ties(model)
        hf_parallel.check(model)

    def _checked_config(self) -> dict[str, Any]:
        """config.json as it lies on the disk, for who read it before mmqc was imported; {} without one."""
        assert self._directory is not None
        path = self._directory / CONFIG
        if not path.exists():
            return {}
        raw = read_json(path)
        check_config(raw, path)
        return raw

    def _listen(self, model: PreTrainedModel) -> None:
        """Keeps what transformers finds missing in the files; a quantizer is not told."""
        adjust = model._adjust_missing_and_unexpected_keys

        def remember(loading_info: Any) -> None:
            adjust(loading_info)
            self._keys = loading_info

        model.__dict__["_adjust_missing_and_unexpected_keys"] = remember

    def _check_tensors(self, model: PreTrainedModel) -> None:
        config, state = self.quantization_config, model.state_dict()
        if self._directory is not None and not config.hashes:
            raise CheckpointError(
                f"{self._directory} has no hashes in quantization_config; copy or download it again, or save the model with "
                "save_pretrained"
            )
        if self._directory is not None:  # otherwise from tensors that the caller passed
            self._check_set(model, state)
            # from the Hub, transformers fetches only what it reads: with a generation_config passed there is no file
            fetched = getattr(model.config, "_commit_hash", None) is not None
            check_generation(self._raw, self._directory, required=model.can_generate() and not fetched)
            self._raw = {}
        unknown = verify(config.hashes, state, lambda name: local(name, model, state))
        if unknown:
            logger.info("%d tensors were cast or offloaded and could not be compared with what was saved", unknown)

    def _check_set(self, model: PreTrainedModel, state: Mapping[str, Any]) -> None:
        """Whether model and files have the same tensors."""
        config, keys, self._keys = self.quantization_config, self._keys, None
        del model.__dict__["_adjust_missing_and_unexpected_keys"]
        missing = [] if keys is None else [name for name in keys.missing_keys if _is_saved(name, model)]
        extra, unlisted = (), ()
        if config.version == VERSION:
            known = {local(name, model, state) for name in config.hashes}
            unlisted = [name for name in state if name not in known and _is_saved(name, model)]
            extra = keys.unexpected_keys if keys is not None and _saved_class(model) else ()
        check_set(missing, extra, unlisted)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        if self._plan is not None:
            self._plan.finish(model)
            attach_config(model, config.quant_config, {"passes": [], "untied": []})
            return model
        rebuild_factors(model)
        self._check_tensors(model)
        cast_floats(model, self.quantization_config.dtype, self._dtype)
        hf_parallel.split(model)
        if config.visual_token_ids is not None:
            self._attach_modality(model)
        if (kv := config.quant_config.kv) is not None:
            from mmqc.kv.generate import attach  # it imports what registers this module

            attach(model, kv)
        if any(isinstance(module, kv_rounding.KVRounder) for module in model.modules()):
            kv_rounding.decoder_config(model)._attn_implementation = kv_rounding.NAME
        names = {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
        for key, leave in (("inside", watch), ("unseen", guard)):
            places = (local(fqn, model, names) for fqn in config.record.get(key, ()))
            leave(model, [name for name in places if name])
        return model

    def _attach_modality(self, model: PreTrainedModel) -> None:
        config = self.quantization_config
        context = ModalityContext.attach(model, tuple(config.visual_token_ids or ()))
        context.text_only = not config.visual_token_ids
        names = {name for name, _ in model.named_modules()}
        for fqn, spec in config.modules.items():
            if spec.get("modality") and (name := local(fqn, model, names)):
                module = model.get_submodule(name)
                assert isinstance(module, QuantLinear | QuantExperts)
                module.modality = context


@contextmanager
def model_init(cls: type[PreTrainedModel], dtype: torch.dtype) -> Iterator[None]:
    """The contexts in which ``from_pretrained`` builds a model: meta device, default dtype, no initialisation."""
    with ExitStack() as stack:
        for context in cls.get_init_context(dtype, True, False, None):
            stack.enter_context(context)
        yield


def local(fqn: str, model: PreTrainedModel, names: Container[str]) -> str | None:
    """``fqn`` as ``model`` spells it, if it is among ``names``; None for what a bare base model leaves out.

    ``AutoModel`` loads the base model alone: "model.visual.x" is "visual.x" there, and there is no head.  The class
    that saved the checkpoint must have everything, so ``fqn`` comes back as it is even if it is not among ``names``.
    """
    if fqn in names or _saved_class(model):
        return fqn
    bare = fqn.removeprefix(model.base_model_prefix + ".")
    return bare if bare in names else None


def _saved_class(model: PreTrainedModel) -> bool:
    """Whether ``model`` is of the class that was saved."""
    return type(model).__name__ in (getattr(model.config, "architectures", None) or [type(model).__name__])


def _is_saved(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor of ``model`` must come from the checkpoint: all but those of a head that another class put on the base."""
    return _saved_class(model) or model.base_model is model or name.startswith(model.base_model_prefix + ".")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What tensors are made with where nobody says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rebuild(model: PreTrainedModel, config: MmqcConfig, dtype: torch.dtype) -> None:
    """Gives a freshly built ``model`` the structure that ``config`` describes, on the meta device.

    Args:
        model: of the class that was saved, or its base model.
        config: what was saved.
        dtype: takes the place of the dtype that the model had when it was saved.

    Raises:
        ValueError: the model has no module where the config has one.
    """
    dtypes = {config.dtype: dtype} if config.dtype else {}
    names = {name for name, _ in model.named_modules()}
    children = (kv_rounding.CHILD, query_moment.CHILD, BASE)  # that an attention module or a linear may have got
    names |= {f"{name}.{child}" for name in names for child in children}
    places = {fqn: local(fqn, model, names) for fqn in (*config.modules, *map(_parent, config.parameters))}
    lost = [fqn for fqn, name in places.items() if name not in names]
    if lost and (len(lost) == len(places) or any(places[fqn] for fqn in lost)):
        saved = (getattr(model.config, "architectures", None) or ["another class"])[0]
        raise ValueError(f"quantization_config has {lost[0]}, but {type(model).__name__} has no such module; load it with {saved}")
    for fqn, spec in config.modules.items():
        if (name := places[fqn]) is not None:
            module = build_module(spec, dtypes, f"quantization_config.modules.{fqn}")
            if isinstance(module, AdaptedLinear):
                module.base = model.get_submodule(name)
            model.set_submodule(name, module)
            if isinstance(module, QuantExperts):  # whose float weights some models initialise from the block around them
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True  # type: ignore[assignment]
    for fqn, spec in config.parameters.items():
        if (name := places[_parent(fqn)]) is None:
            continue
        parameter = None
        if spec is not None:
            kind = dtypes.get(spec["dtype"]) or dtype_of(spec["dtype"], f"parameters.{fqn}.dtype")
            parameter = nn.Parameter(torch.empty(spec["shape"], dtype=kind, device="meta"))
        model.get_submodule(name).register_parameter(fqn.rpartition(".")[2], parameter)


def float_dtype(model: PreTrainedModel) -> torch.dtype:
    """``model.dtype``; of a model all of whose parameters were quantized, its config's."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return own or getattr(model.config, "dtype", None) or torch.get_default_dtype()


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _above(name: str) -> Iterator[str]:
    """The modules that a tensor lies in, the innermost first."""
    while name := _parent(name):
        yield name


def cast_floats(model: PreTrainedModel, saved: str | None, dtype: torch.dtype) -> None:
    """Casts what still has the ``saved`` dtype to the one that was asked for.

    transformers casts by itself, but not the tensors of a quantized model that have another name in the checkpoint.
    """
    if saved in (None, dtype_name(dtype)):
        return
    patterns = [re.compile(fnmatch.translate(f"*{pattern}*")) for pattern in model._get_dtype_plan(dtype)]
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept = name.rpartition(".")[2] in (*SCALES, *CODES)
        if dtype_name(tensor.dtype) == saved and not kept and not any(p.match(name) for p in patterns):
            tensor.data = tensor.data.to(dtype)


def attach_config(model: nn.Module, config: QuantConfig, record: Mapping[str, Any] | None = None) -> MmqcConfig | None:
    """Makes a model that holds mmqc modules savable with ``save_pretrained``, for ``from_pretrained`` to load.

    Args:
        model: a ``PreTrainedModel`` whose modules were replaced in place.  Anything else is left alone: its
            ``state_dict`` is all there is to save.
        config: what it was quantized to.
        record: plain data for ``mmqc.explain``.

    Returns:
        The config, which is now ``model.config.quantization_config``; None for a model that is not transformers'.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    context = attached(model)
    quantization = MmqcConfig(
        config=plain(config.to_dict()),
        modules={name: spec for name, module in model.named_modules() if (spec := module_spec(module))},
        dtype=dtype_name(float_dtype(model)),
        untied=untie(model),
        visual_token_ids=context.visual_token_ids if context else None,
        record=plain(record or {}),
    )
    model.config.quantization_config = quantization
    for name, value in (("hf_quantizer", MmqcQuantizer(quantization)), ("is_quantized", True)):
        object.__setattr__(model, name, value)
    object.__setattr__(model, "quantization_method", METHOD)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True
    return quantization


GenerationConfig.to_json_file = signing(GenerationConfig.to_json_file, GENERATION)  # pyright: ignore[reportAttributeAccessIssue]
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MmqcConfig
AUTO_QUANTIZER_MAPPING[METHOD] = MmqcQuantizer
