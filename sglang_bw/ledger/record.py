"""What an experiment leaves behind: arms, blocks of requests, ratios, and the run that holds them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 1
Verdict = Literal["faster", "slower", "undecided"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Part):
    """The machine, as far as it can be seen from here.

    :ivar fingerprint: the same for the same processors, GPUs and driver; no host name in it.
    :ivar local: false when the servers were only named by URL and run elsewhere.
    """

    fingerprint: str
    cpu: str
    cores: int
    memory_gib: float
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    local: bool = True


class EngineRecord(_Part):
    """The engine of an arm.

    :ivar version: ``0.5.23+bw.1``.
    :ivar series: ``bw.1``; ``None`` for stock and where only the version is known.
    :ivar tree: git tree of the patched sources, when it is known.
    """

    version: str
    series: str | None = None
    tree: str | None = None
    patches: tuple[str, ...] = ()


class ArmRecord(_Part):
    """One of the two sides of a comparison.

    :ivar name: ``A`` is the baseline, ``B`` the treatment.
    :ivar says: what it is meant to be, in words.
    :ivar recipe: id of what was started; ``None`` for a server that was already running.
    :ivar launch: digest of the exact launch (:mod:`sglang_bw.ledger.identity`), likewise.
    :ivar argv: engine flags, secrets taken out; empty for a server that was already running.
    :ivar env: variables that a launch adds, secrets taken out.
    :ivar config: the server's own resolved configuration (``/server_info``), without what changes while it runs.
    :ivar kv_tokens: size of its KV pool, tokens.
    :ivar graphs: whether it captured decode graphs; ``None`` when it does not say.
    :ivar memory: what its memory holds, part -> GB of one GPU; empty when it does not say.
    """

    name: Literal["A", "B"]
    says: str
    recipe: str | None = None
    launch: str | None = None
    url: str
    argv: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    engine: EngineRecord
    speculation: str | None = None
    kv_tokens: int | None = None
    graphs: bool | None = None
    memory: dict[str, float] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class RequestRow(_Part):
    """One request, as the client saw it. Times are seconds of a monotonic clock.

    :ivar began_s: since the begin of the block.
    :ivar ttft_s: request sent to first token received.
    :ivar tpot_s: (end to end - TTFT) / (output tokens - 1); ``None`` for a single token.
    :ivar itl_s: gaps between arrivals at the client: median, 99th percentile, largest; tokens of one verify pass
        arrive together, so these are gaps between bursts.
    :ivar prompt_tokens: from the server's ``usage``, like the other counts.
    :ivar rounds: verify passes; 0 without speculation.
    :ivar accepted: draft tokens that they accepted.
    :ivar histogram: number of verify passes that accepted 0, 1, 2... draft tokens.
    :ivar output_ids: output tokens; ``None`` where the server does not give them.
    :ivar text: the answer; compared where an arm gives no ids. ``None`` beside ids in records of older releases.
    """

    prompt: str
    began_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: tuple[float, float, float] | None = None
    e2e_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()
    output_ids: tuple[int, ...] | None = None
    text: str | None = None
    finish: str | None = None


class GpuUse(_Part):
    """NVML, sampled while a block ran: medians, one a GPU."""

    clock_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    pcie_rx_mb_s: tuple[float, ...] = ()
    pcie_tx_mb_s: tuple[float, ...] = ()


class PolicyLook(_Part):
    """What an adaptive policy believed at a moment.

    :ivar at_s: since the begin of the block.
    :ivar steps: draft steps a round; 0 is plain decoding.
    :ivar switches: how often it has changed them since the server started.
    :ivar accept_length: that it expects, bonus token included.
    :ivar round_ratio: R, seconds of a round over those of a plain decode step.
    :ivar reason: of its last switch.
    """

    at_s: float
    steps: int
    switches: int
    accept_length: float | None = None
    round_ratio: float | None = None
    reason: str = ""


class Block(_Part):
    """All prompts once, on one arm, at one concurrency.

    :ivar round: from 0; a round is one block of each arm, in the order A B, then B A, and so on.
    :ivar position: from 0, in the order in which the blocks of the whole run were done.
    :ivar client_lag_s: median lateness of the client's own event loop; over a millisecond the client is too slow.
    :ivar client_cpu: share of one core that the client used.
    :ivar kv_use: largest share of the KV pool seen in use; ``None`` when the server does not say.
    :ivar spread_s: quantiles (0.5, 0.9, 0.99) of every gap between arrivals.
    :ivar policy: what the server's adaptive policy believed while the block ran; empty without one.
    """

    kind: Literal["block"] = "block"
    arm: Literal["A", "B"]
    round: int
    position: int
    concurrency: int
    began: datetime
    seconds: float
    rows: tuple[RequestRow, ...]
    spread_s: tuple[float, float, float] | None = None
    client_lag_s: float = 0.0
    client_cpu: float = 0.0
    kv_use: float | None = None
    gpu: GpuUse | None = None
    policy: tuple[PolicyLook, ...] = ()
    graph_share: float | None = Field(default=None, description="Share of logged decode batches that ran as a graph.")


class ArmNumbers(_Part):
    """What one arm did at one concurrency, over all its blocks.

    :ivar tok_s: output tokens per second in all.
    :ivar tok_s_user: median over requests of output tokens per second.
    :ivar goodput: requests per second that met every limit; ``None`` without limits.
    :ivar accept_length: tokens that a verify pass emits on average, the bonus token included.
    :ivar histogram: number of verify passes that accepted 0, 1, 2... draft tokens.
    """

    tok_s: float
    tok_s_user: float
    ttft_s: tuple[float, float, float] = Field(description="Quantiles 0.5, 0.9, 0.99.")
    tpot_s: tuple[float, float, float]
    itl_s: tuple[float, float, float]
    e2e_s: tuple[float, float, float]
    goodput: float | None = None
    accept_length: float | None = None
    histogram: tuple[int, ...] = ()
    kv_use: float | None = None
    graph_share: float | None = None
    gpu: GpuUse | None = None


class Ratio(_Part):
    """Speed of B over A with its interval.

    :ivar value: geometric mean over rounds and prompts.
    :ivar low: lower end of the 95 % interval.
    :ivar half_width: of the interval, as a share of the ratio.
    :ivar drift: of the baseline: speed of its last over its first block, along a straight line through all of them.
    :ivar drifted: that is more than chance, and more than the interval.
    :ivar round_cost: R, cost of a speculative round over a decode step: accept length / decode speed-up.
    """

    concurrency: int
    value: float
    low: float
    high: float
    half_width: float
    rounds: int
    prompts: int
    verdict: Verdict
    drift: float
    drifted: bool
    round_cost: float | None = None
    a: ArmNumbers
    b: ArmNumbers


class Difference(_Part):
    """The first place where two answers to one prompt part.

    :ivar position: in tokens; in characters when the server gives no token ids.
    :ivar a: what A wrote from there on, some tokens or characters.
    """

    prompt: str
    concurrency: int
    position: int
    unit: Literal["token", "character"]
    before: str
    a: str
    b: str


class OutputComparison(_Part):
    """Answers of both arms, compared at temperature 0.

    :ivar compared: prompts that both arms answered, each concurrency by itself.
    :ivar different: how many of them differ.
    :ivar unsteady: how many of A's answers differ from A's own first answer.
    """

    compared: int
    different: int
    unsteady: int
    first: Difference | None = None


class Outcome(_Part):
    """The end of a run.

    :ivar valid: false when a guard says that the numbers must not be used.
    :ivar failure: class of what ended the run early: ``start-failed``, ``wrong-arm``, ``server-died``,
        ``server-error``, ``timeout``, ``bad-stream``, ``prompts``, ``interrupted``, ``other``; ``None`` for a run that
        came to its end.
    :ivar arm: which arm failed.
    """

    kind: Literal["outcome"] = "outcome"
    ended: datetime
    valid: bool
    ratios: tuple[Ratio, ...] = ()
    outputs: OutputComparison | None = None
    warnings: tuple[str, ...] = ()
    failure: str | None = None
    failure_text: str | None = None
    arm: Literal["A", "B"] | None = None


class RunRecord(_Part):
    """One experiment.

    :ivar difference: configuration values that are not the same in both arms: key -> (A, B).
    :ivar simulated: acceptance was simulated (SGLANG_SIMULATE_ACC_LEN): no real speed.
    :ivar settings: of the load: temperature, tokens, limits, prompt set and its digest.
    """

    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA
    id: str
    command: Literal["ab", "trial"] = "ab"
    began: datetime
    tool: str
    hypothesis: str
    recipe: str | None = None
    host: Host
    arms: tuple[ArmRecord, ArmRecord]
    difference: dict[str, tuple[Any, Any]] = Field(default_factory=dict)
    simulated: bool = False
    settings: dict[str, Any] = Field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    outcome: Outcome | None = None
