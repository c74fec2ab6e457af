"""What a server says of itself: the parts of ``/server_info`` that a comparison keeps."""

from __future__ import annotations

from typing import Any

from sglang_bw.ledger.record import PolicyLook

Info = dict[str, Any]
PATHS = ("/server_info", "/get_server_info")  # the second one: engines up to 0.5.16
# Of a server's own state and address, not of its configuration.
_VOLATILE = {
    *("internal_states", "startup_time", "launch_command", "kv_events", "host", "port", "nccl_port", "random_seed"),
    *("dist_init_addr", "log_level", "status"),
}
_SECRET = ("api_key", "password", "watermark", "secret")


def config(info: Info) -> Info:
    """Return the configuration in a server's answer: without state, addresses and secrets."""
    return {
        key: value
        for key, value in sorted(info.items())
        if key not in _VOLATILE and not any(word in key for word in _SECRET)
    }


def kv_tokens(info: Info) -> int | None:
    """Return the size of the KV pool in tokens."""
    memory = _state(info).get("memory_usage") or {}
    found = info.get("max_total_num_tokens") or memory.get("token_capacity")
    return int(found) if found else None


def memory(info: Info) -> dict[str, float]:
    """Return what the memory of one GPU holds, part -> GB, and what was left free after the start.

    On a CPU it is the machine's memory.
    """
    found = _state(info).get("memory_usage") or {}
    captured = found.get("graph")
    sizes = {
        "weights": found.get("weight"),
        "KV cache": found.get("kvcache"),
        "graphs": sum(captured.values()) if isinstance(captured, dict) else captured,
        "free": found.get("startup_available"),
    }
    return {part: float(size) for part, size in sizes.items() if isinstance(size, int | float)}


def look(info: Info, at_s: float) -> PolicyLook | None:
    """Return what the adaptive policy believes; ``None`` without one, or with one that does not tell, as upstream's.

    :param at_s: when it was asked, seconds since the begin of the block.
    """
    said = _state(info).get("spec_adaptive")
    if not isinstance(said, dict) or "steps" not in said:
        return None
    try:
        return PolicyLook(
            at_s=at_s,
            steps=int(said["steps"]),
            switches=int(said.get("switches") or 0),
            accept_length=said.get("accept_length"),
            round_ratio=said.get("round_ratio"),
            reason=str(said.get("reason") or ""),
        )
    except (ValueError, TypeError, OverflowError):
        return None


def speculation(info: Info) -> str | None:
    """Return algorithm, steps, topk and draft tokens in words; ``None`` without speculation."""
    algorithm = info.get("speculative_algorithm")
    if not algorithm:
        return None
    steps, topk, tokens = (info.get(f"speculative_{key}") for key in ("num_steps", "eagle_topk", "num_draft_tokens"))
    return f"{algorithm}, {steps} steps, topk {topk}, {tokens} draft tokens"


def graphs(info: Info) -> bool | None:
    """Tell whether decode graphs were captured; ``None`` when it does not say."""
    if info.get("disable_cuda_graph"):
        return False
    captured = _state(info).get("decode_cuda_graph_bs")
    return bool(captured) if captured is not None else None


def _state(info: Info) -> Info:
    """Return the state of the first scheduler."""
    states = info.get("internal_states") or [{}]
    return states[0] if isinstance(states, list) and isinstance(states[0], dict) else {}
