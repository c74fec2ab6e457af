"""Rules: every one can fire, each names its reference, and what the series repairs is no refusal."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.fork.series import Series, newest_base, patches_root
from sglang_bw.plan.rules import facts
from sglang_bw.plan.rules.check import Rule, check, rules
from sglang_bw.plan.rules.facts import Facts
from sglang_bw.recipes import flags, releases
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.review import review
from tests.conftest import CHECKOUT

STOCK, PATCHED = "0.5.23", "0.5.23+bw.1"
PRO = Hardware("cuda", "sm120", "RTX PRO 6000", "pcie", 8)
SPARK = Hardware("cuda", "sm121", "GB10", "", 1)
B200 = Hardware("cuda", "sm100", "B200", "nvlink", 8)

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "vision_config": {},
    "text_config": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 384,
        "vocab_size": 163840,
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
}
GLM_NVFP4 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "vocab_size": 154880,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
MLA_DRAFT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "vocab_size": 163840,
}
MHA_DRAFT = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 163840, "draft_vocab_size": 32000}
NARROW = MHA_DRAFT | {"hidden_size": 1024, "target_hidden_size": 2048}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 163840, "hidden_size": 2048}
TOPICS = frozenset(path.stem[5:] for path in Series.load(patches_root(), newest_base(patches_root())).files)


def found(
    line: str,
    config: dict[str, Any] = KIMI,
    *,
    machine: Hardware = PRO,
    draft: dict[str, Any] | None = None,
    engine: str = STOCK,
    board_mib: int = 97887,
    **env: str,
) -> dict[str, str]:
    """Return rule -> severity for a launch."""
    collected = facts.collect(
        machine=machine,
        board_mib=board_mib,
        flags=flags.parse(shlex.split(line)),
        env=env,
        config=config,
        draft_config=draft,
        engine=engine,
        patches=TOPICS if engine == PATCHED else frozenset(),
    )
    return {finding.rule: finding.severity for finding in check(collected)}


@pytest.mark.parametrize(
    ("rule", "line", "options"),
    [
        # The first system's dead ends.
        pytest.param("allreduce-fusion-sm12x", "--enable-flashinfer-allreduce-fusion", {}, id="fusion"),
        pytest.param("nccl-tree-graphs", "", {"NCCL_ALGO": "Tree"}, id="nccl tree"),
        pytest.param("torch-symm-mem-old", "--enable-torch-symm-mem", {"engine": "0.5.9"}, id="symmetric memory"),
        pytest.param("a2a-needs-cutlass", "--ep-size 8 --moe-a2a-backend flashinfer", {}, id="all-to-all"),
        # Backends without kernels.
        pytest.param("trtllm-mla-prefill", "--attention-backend trtllm_mla", {}, id="trtllm_mla"),
        pytest.param("fa3-blackwell", "--attention-backend fa3", {"machine": B200}, id="fa3"),
        pytest.param(
            "mla-attention-without-mla",
            "--attention-backend trtllm_mla",
            {"machine": B200, "config": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936}},
            id="MLA backend, another model",
        ),
        pytest.param("flashmla-sm12x", "--prefill-attention-backend flashmla", {}, id="flashmla for prefill"),
        pytest.param("cutedsl-mla-sm12x", "--attention-backend tokenspeed_mla", {}, id="cutedsl"),
        pytest.param("trtllm-gen-moe-sm12x", "--moe-runner-backend flashinfer_trtllm", {}, id="trtllm-gen experts"),
        pytest.param("deep-gemm-sm12x", "--moe-runner-backend deep_gemm", {}, id="deep gemm"),
        pytest.param("deep-gemm-env-sm12x", "", {"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}, id="deep gemm by variable"),
        pytest.param("dsa-kernels-sm12x", "--dsa-decode-backend trtllm", {"config": GLM_NVFP4}, id="sparse MLA"),
        pytest.param("nvfp4-moe-auto-sm12x", "", {"config": GLM_NVFP4}, id="NVFP4 experts"),
        pytest.param("fp4-kv-sm121", "--kv-cache-dtype nvfp4", {"machine": SPARK}, id="FP4 KV on GB10"),
        pytest.param("mscclpp-sm12x", "--enable-mscclpp", {}, id="mscclpp"),
        pytest.param("nvls-pcie", "--enable-nccl-nvls", {}, id="NVLS without NVLink"),
        # Speculation.
        pytest.param(
            "eagle-for-eagle3-draft", "--speculative-algorithm EAGLE", {"draft": MLA_DRAFT}, id="EAGLE for EAGLE-3"
        ),
        pytest.param(
            "draft-inherits-quantization",
            "--quantization modelopt_fp4 --speculative-algorithm EAGLE3",
            {"draft": MHA_DRAFT},
            id="draft quantization",
        ),
        pytest.param(
            "draft-of-another-model",
            "--speculative-algorithm EAGLE3",
            {"draft": MLA_DRAFT, "config": GLM_NVFP4},
            id="draft of another model",
        ),
        pytest.param(
            "draft-of-another-width",
            "--speculative-algorithm EAGLE3",
            {"draft": MHA_DRAFT | {"hidden_size": 4096}, "config": QWEN | {"hidden_size": 2048}},
            id="draft of another width",
        ),
        pytest.param(
            "draft-of-another-width",
            "--speculative-algorithm EAGLE3",
            {"draft": MHA_DRAFT | {"hidden_size": 2048, "target_hidden_size": 4096}, "config": QWEN},
            id="draft for another width",
        ),
        pytest.param(
            "plain-model-as-eagle3-draft",
            "--speculative-algorithm EAGLE3",
            {"draft": QWEN, "config": QWEN},
            id="its own draft",
        ),
        pytest.param(
            "mla-draft-attention",
            "--speculative-algorithm EAGLE3 --attention-backend trtllm_mla",
            {"draft": MHA_DRAFT, "machine": B200},
            id="MHA draft, MLA target",
        ),
        pytest.param("trtllm-mha-tree", "--attention-backend trtllm_mha --speculative-eagle-topk 4", {}, id="tree"),
        pytest.param(
            "rejection-sampling-draft-vocab",
            "--speculative-algorithm EAGLE3 --speculative-use-rejection-sampling",
            {"draft": MHA_DRAFT},
            id="reduced vocabulary",
        ),
        pytest.param(
            "kimi-eagle3-hooks", "--speculative-algorithm EAGLE3", {"draft": MLA_DRAFT, "engine": "0.5.9"}, id="hooks"
        ),
    ],
)  # fmt: skip
def test_what_does_not_run_is_an_error(rule: str, line: str, options: dict[str, Any]) -> None:
    assert found(line, **options).get(rule) == "error"


@pytest.mark.parametrize(
    ("rule", "line", "options"),
    [
        pytest.param("vision-fraction", "", {}, id="default fraction of a vision model"),
        pytest.param("custom-allreduce-pcie", "", {"SGLANG_SKIP_P2P_CHECK": "1"}, id="forced custom all-reduce"),
        pytest.param("ep-pcie", "--ep-size 8", {}, id="experts over PCIe"),
        pytest.param("kimi-int4-fp8-kv", "--kv-cache-dtype fp8_e4m3", {}, id="FP8 KV on INT4"),
        pytest.param(
            "expandable-segments-ipc", "", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, id="segments"
        ),
        pytest.param(
            "expandable-segments-newer-name", "", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, id="newer name"
        ),
        pytest.param("spark-fraction", "--mem-fraction-static 0.9", {"machine": SPARK}, id="fraction on GB10"),
        pytest.param(
            "adaptive-short-form", """--speculative-adaptive-config '{"1": [5]}'""", {}, id="short form of the file"
        ),
    ],
)
def test_what_harms_is_a_warning(rule: str, line: str, options: dict[str, Any]) -> None:
    assert found(line, **options).get(rule) == "warning"


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--attention-backend trtllm_mla", {"machine": B200}),
        ("--attention-backend triton --mem-fraction-static 0.9", {}),
        ("--moe-runner-backend flashinfer_trtllm --mem-fraction-static 0.9", {"machine": B200}),
        # A draft of another width that says so, one that says nothing, MTP layers, and a small model as a draft.
        ("--speculative-algorithm EAGLE3", {"draft": NARROW, "config": QWEN}),
        ("--speculative-algorithm EAGLE3", {"draft": MHA_DRAFT, "config": QWEN}),
        ("--speculative-algorithm NEXTN", {"draft": QWEN, "config": QWEN}),
        ("--speculative-algorithm STANDALONE", {"draft": QWEN | {"hidden_size": 1024}, "config": QWEN}),
    ],
)
def test_what_runs_is_left_alone(line: str, options: dict[str, Any]) -> None:
    assert "error" not in found(line, **options).values()


@pytest.mark.parametrize(
    ("rule", "line", "options"),
    [
        ("trtllm-mla-prefill", "--attention-backend trtllm_mla", {}),
        ("nvfp4-moe-auto-sm12x", "", {"config": GLM_NVFP4}),
        ("eagle-for-eagle3-draft", "--speculative-algorithm EAGLE", {"draft": MLA_DRAFT}),
        ("allreduce-fusion-sm12x", "--enable-flashinfer-allreduce-fusion", {}),
    ],
)
def test_what_the_series_repairs_is_a_note(rule: str, line: str, options: dict[str, Any]) -> None:
    assert found(line, **options)[rule] == "error"
    assert found(line, engine=PATCHED, **options)[rule] == "note"


def test_a_value_that_the_engine_resolved_counts() -> None:
    from sglang_bw.plan.resolution import Resolution

    resolution = Resolution({}, {"attention_backend": "fa3", "cuda_graph_config": {"decode": {"max_bs": 8}}})
    collected = facts.collect(
        machine=PRO, board_mib=97887, flags=(), env={}, config=KIMI, draft_config=None, engine=STOCK,
        patches=frozenset(), resolution=resolution,
    )  # fmt: skip
    assert "fa3-blackwell" in {finding.rule for finding in check(collected)}
    assert collected.get("flag.cuda-graph-max-bs-decode") == [8]


def test_rules_are_well_formed() -> None:
    ids = [rule.id for rule in rules()]
    assert len(ids) == len(set(ids))
    page = (CHECKOUT / "docs" / "plan.md").read_text(encoding="utf-8")
    for rule in rules():
        assert re.match(r"https://|first system, docs/plan.md", rule.reference), rule.id
        assert not rule.reason.endswith("."), rule.id
    assert "first system" in page


def test_rules_name_facts_and_flags_that_exist() -> None:
    """A misspelt name would make a rule that never fires."""
    values = set(facts.collect(
        machine=PRO, board_mib=1, flags=flags.parse(["--speculative-algorithm", "EAGLE3"]), env={}, config=KIMI,
        draft_config=MHA_DRAFT, engine=STOCK, patches=frozenset(),
    ).values) | set(facts._GROUPS)  # fmt: skip
    known = set(releases._spans())
    for rule in rules():
        for name in (*rule.when, *rule.unless):
            kind, _, rest = name.partition(".")
            assert kind == "env" or rest in known if rest else name in values, (rule.id, name)
    for group in facts._GROUPS.values():
        assert set(group) <= known


def test_rules_name_patches_that_exist() -> None:
    bases = [Series.load(patches_root(), path.name) for path in patches_root().iterdir() if path.is_dir()]
    topics = {path.stem[5:] for series in bases for path in series.files}
    named = {re.sub(r"^\d{4}-", "", rule.fixed_by) for rule in rules() if rule.fixed_by}
    assert named - topics <= {"kimi-k25-eagle3"}  # of the 0.5.9 series


def test_no_bundled_recipe_breaks_a_rule_on_its_own_machine() -> None:
    from sglang_bw.launch import command as commands
    from sglang_bw.plan.checkpoint import read_config
    from sglang_bw.recipes import configs, lookup

    for name in lookup.catalogue():
        recipe = lookup.find(name)
        if not recipe.hardware.board:
            continue
        assert recipe.target.config
        machine = Hardware("cuda", "sm120", recipe.hardware.board[0], "pcie", recipe.hardware.gpus[0])
        built = commands.build(recipe, machine, {}, version=PATCHED)
        config = read_config(configs.shipped(recipe.target.config).path / "config.json")
        draft = None
        if recipe.draft and recipe.draft.config:
            draft = read_config(configs.shipped(recipe.draft.config).path / "config.json")
        line = " ".join(flags.tokens(built.flags))
        severities = found(line, config, machine=machine, draft=draft, engine=PATCHED, **built.env)
        assert "error" not in severities.values(), (name, severities)
        assert review(recipe).errors == ()


@given(
    value=st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()),
    wanted=st.one_of(st.booleans(), st.text(), st.integers(), st.lists(st.text()), st.sampled_from([">2", "<=1e3"])),
)
def test_conditions_never_raise(value: Any, wanted: Any) -> None:
    rule = Rule.model_construct(
        id="x",
        when={"thing": wanted},
        unless={},
        engine="",
        severity="error",
        reason="r",
        fix="f",
        reference="https://",
    )
    assert rule.holds(Facts({"thing": value}, {}, {})) in (True, False)
