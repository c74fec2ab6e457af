"""What the installed engine itself makes of a list of cases; run in a process of its own, prints JSON.

``python -m tests.plan.engine_facts FILE``: FILE holds the cases; the answer has one entry each, in their order. The
engine's resolver runs as the board of the case, its pool configurator with the shapes of the case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.patches.model_shapes import model_config
from tests.patches.resolver import machine, resolve

GIB = 1 << 30


def defaults(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the case's flags and return what memory depends on."""
    view = resolve(case["arch"], case["memory_mib"], **flags(case, folder))
    graphs = view.cuda_graph_config
    return {
        "mem_fraction_static": view.mem_fraction_static,
        "chunked_prefill_size": view.chunked_prefill_size,
        "decode_max_bs": graphs.decode.max_bs,
        "prefill_graph": graphs.prefill.backend != "disabled",
        "max_running_requests": view.max_running_requests,
    }


def pool(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the engine's bytes of a token, tokens and state slots for the case's budget."""
    import torch
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish, reset_context
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    reset_context()
    args = ServerArgs(
        **{"device": "cpu", "skip_tokenizer_init": True, "mem_fraction_static": 0.5, **flags(case, folder)}
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    config = ModelConfig.from_server_args(args)
    layers = config.num_hidden_layers
    fp8 = str(args.kv_cache_dtype).startswith("fp8")
    made_class = kv_cache_configurator.KVCacheConfigurator
    made_class._resolve_kv_shard = lambda _self: None  # type: ignore[method-assign]
    fields = [f.name for f in dataclasses.fields(made_class) if f.init and f.default is dataclasses.MISSING]
    aux = resolve_spec_aux_hidden_state_config(
        server_args=args, model_config=config, spec_algorithm=algorithm, is_draft_worker=False
    )
    windowed = list(getattr(config, "swa_attention_layer_ids", None) or [])
    full = list(getattr(config, "full_attention_layer_ids", None) or [])
    made = made_class(
        **dict.fromkeys(fields)
        | {
            "model_config": config,
            "server_args": args,
            "attn_dp_size": 1,
            "pp_size": 1,
            "kv_cache_dtype": torch.float8_e4m3fn if fp8 else torch.bfloat16,
            "kv_cache_dtype_str": str(args.kv_cache_dtype),
            "model_dtype": torch.bfloat16,
            "page_size": case.get("page_size", 1),
            "spec_algorithm": algorithm,
            "is_draft_worker": False,
            "is_hybrid_swa": config.is_hybrid_swa,
            "sliding_window_size": getattr(config, "sliding_window_size", None),
            "spec_aux_config": aux,
            "use_mla_backend": config.attention_arch == AttentionArch.MLA,
            "layer_info": SimpleNamespace(
                num_effective_layers=layers,
                start_layer=0,
                end_layer=layers,
                is_hybrid_swa_mtp_draft=False,
                swa_attention_layer_ids=windowed,
                full_attention_layer_ids=full,
            ),
        }
    )
    made.kv_shard_rank, made.kv_shard_size, made.kv_shard_spec, made.kv_shard_group = None, 1, None, None
    rest = case["budget_gib"]
    if made.mambaish_config is not None:
        rest = made._handle_max_mamba_cache(rest)
    sized = create_memory_pool_configurator(made)
    tokens = sized.calculate_pool_sizes(int(rest * GIB), case.get("page_size", 1)).max_total_num_tokens
    slots = get_schedule().max_mamba_cache_size if made.mambaish_config is not None else None
    reset_context()
    return {"cell": sized._cell_size, "tokens": tokens, "slots": slots}


def flags(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    given = dict(case.get("flags", {}))
    given["model_path"] = model_config(folder, case["target"], **case.get("changes", {}))
    if draft := case.get("draft"):
        given["speculative_draft_model_path"] = model_config(folder / "draft", draft)
    return given


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    answers = []
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            if case["ask"] == "defaults":
                answers.append(defaults(case, Path(folder)))
            else:
                with machine(case.get("arch", "sm120"), case.get("memory_mib", 97887)):
                    answers.append(pool(case, Path(folder)))
        print(f"case {number + 1} of {len(cases)}", file=sys.stderr)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
