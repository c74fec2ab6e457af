"""How many bits a quantized weight takes, scales included, from a checkpoint's ``quantization_config``."""

from __future__ import annotations

from sglang_bw.plan.fields import Fields
from sglang_bw.plan.shapes import Quantization

_SCALE_BITS = {"float": 8, "int": 16}  # NVFP4 keeps FP8 scales, integer groups 16-bit ones
_MX_GROUP = 32
_NVFP4_GROUP = 16


def read_quantization(part: Fields | None) -> Quantization:
    """Read the configuration of the quantization; a method nobody knows here counts as not quantized."""
    if part is None:
        return Quantization()
    inner = part.part("quantization") or part  # hf_quant_config.json has one level more
    method = str(part.any("quant_method") or "").lower()
    algorithm = str(inner.any("quant_algo", "quantization_type") or "").upper()
    skipped = _skipped(part, inner)
    if method.startswith("modelopt") or algorithm:
        return _modelopt(algorithm, inner, skipped)
    if method in ("compressed-tensors", "compressed_tensors"):
        bits = _group_bits(part)
        return Quantization("compressed-tensors", bits, everywhere=_targets_all(part), skipped=skipped)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization("fp8", 8 + _block_bits(part), skipped=skipped)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        group = max(1, part.number("group_size", "q_group_size", default=128, least=-1))
        return Quantization(method, part.number("bits", "w_bit", default=4) + 20 / group, skipped=skipped)
    if method in ("mxfp4", "mxfp8"):
        return Quantization(method, int(method[-1]) + 8 / _MX_GROUP, everywhere=method != "mxfp4", skipped=skipped)
    return Quantization()


def _modelopt(algorithm: str, part: Fields, skipped: tuple[str, ...]) -> Quantization:
    declared = str(part.any("kv_cache_quant_algo") or "").upper()
    scheme = part.part("kv_cache_scheme")
    fp8_kv = declared == "FP8" or (scheme is not None and scheme.number("num_bits", default=16) == 8)
    names = {"NVFP4": "modelopt_fp4", "FP8": "modelopt_fp8", "MXFP8": "mxfp8", "MIXED_PRECISION": "modelopt_mixed"}
    bits = {"NVFP4": 4 + 8 / _NVFP4_GROUP, "MIXED_PRECISION": 4 + 8 / _NVFP4_GROUP, "MXFP8": 8 + 8 / _MX_GROUP}
    key = algorithm.replace("W4A16_", "")
    return Quantization(names.get(key, "modelopt"), bits.get(key, 8.0), key != "MIXED_PRECISION", skipped, fp8_kv)


def _group_bits(part: Fields) -> float:
    """Return the bits of the first group of compressed-tensors' ``config_groups``."""
    for group in part.parts("config_groups"):
        weights = group.part("weights")
        if weights is None:
            continue
        bits, group_size = weights.number("num_bits", default=16), weights.number("group_size", default=0, least=-1)
        scale = _SCALE_BITS.get(str(weights.any("type") or "int"), 16)
        return bits + (scale / group_size if group_size > 0 and bits < 8 else 0)
    return 16.0


def _targets_all(part: Fields) -> bool:
    """Tell whether more than the experts is quantized: attention is not among what is left out."""
    return not any("self_attn" in pattern for pattern in _skipped(part, part))


def _block_bits(part: Fields) -> float:
    block = part.numbers("weight_block_size")
    return 32 / (block[0] * block[1]) if len(block) == 2 and min(block) > 0 else 0.0


def _skipped(*parts: Fields) -> tuple[str, ...]:
    names = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
    return tuple(dict.fromkeys(text for part in parts for name in names for text in part.texts(name)))
