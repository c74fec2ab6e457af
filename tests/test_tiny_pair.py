"""Facts about the bundled EAGLE-3 pair and the script that trains it. No engine: the end-to-end tests serve it."""

from __future__ import annotations

import json
import random
import re
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="these tests run in the engine's environment: `make test`")

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from sglang_bw import models

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from tiny import checkpoint, evaluate, settings  # noqa: E402
from tiny.corpus import training_rows  # noqa: E402
from tiny.documents import TEXT, Writer  # noqa: E402
from tiny.draft import Draft, rotate  # noqa: E402
from tiny.prompts import heldout_documents, heldout_prompts  # noqa: E402
from tiny.template import Grammar, Memory, articles, read_rules  # noqa: E402
from tiny.tokens import build_tokenizer, encode  # noqa: E402

pytestmark = pytest.mark.engine
RECORD = json.loads((models.TINY_PAIR / "training.json").read_text(encoding="utf-8"))
TOKENS = 96
PROMPTS = [json.loads(line) for line in models.TINY_PROMPTS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """A model this small gains nothing from more, and threads that wait for one another lose on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(models.TINY_TARGET)


@pytest.fixture(scope="module")
def target():
    """The committed bf16 weights, computed in fp32: on many CPUs that is faster, and it is exact."""
    return checkpoint.load_target(models.TINY_TARGET, torch.float32)


@pytest.fixture(scope="module")
def runs(target):
    """Greedy outputs of the first twelve held-out prompts."""
    return evaluate.greedy_runs(target, [p["prompt"] for p in PROMPTS[:12]], TOKENS)


# --- the files ---


def test_pair_is_at_most_ten_megabytes():
    files = [p for d in (models.TINY_TARGET, models.TINY_DRAFT) for p in d.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 10_000_000


@pytest.mark.parametrize("directory", [models.TINY_TARGET, models.TINY_DRAFT], ids=["target", "draft"])
def test_weights_are_finite_bf16(directory):
    with safe_open(directory / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  a safetensors handle is no mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


def test_configurations_are_what_the_engine_wants():
    target = json.loads((models.TINY_TARGET / "config.json").read_text(encoding="utf-8"))
    draft = json.loads((models.TINY_DRAFT / "config.json").read_text(encoding="utf-8"))
    assert target["architectures"] == ["LlamaForCausalLM"]
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
    # With fewer than 8 layers two of [2, n // 2, n - 3] coincide, and the draft's `fc` does not fit.
    layers = target["num_hidden_layers"]
    assert layers >= 8
    assert len({2, layers // 2, layers - 3}) == 3
    assert draft["num_hidden_layers"] == 1
    for key in ("vocab_size", "hidden_size", "max_position_embeddings", "eos_token_id"):
        assert draft[key] == target[key], key
    assert draft["draft_vocab_size"] == target["vocab_size"]
    assert not draft["tie_word_embeddings"]


def test_draft_checkpoint_holds_the_engine_s_parameters():
    h, v, ff = settings.HIDDEN, settings.VOCAB, settings.DRAFT_FEED_FORWARD
    q, kv = settings.HEADS * settings.HEAD_DIM, settings.KV_HEADS * settings.HEAD_DIM
    expected = {
        "fc.weight": (h, 3 * h),
        "lm_head.weight": (v, h),
        "norm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (ff, h),
        "midlayer.mlp.up_proj.weight": (ff, h),
        "midlayer.mlp.down_proj.weight": (h, ff),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
    }
    with safe_open(models.TINY_DRAFT / "model.safetensors", "pt") as weights:
        found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    assert found == expected


# --- the tokenizer ---


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Once upon a time", id="ascii"),
        pytest.param("  two  spaces\n\ttab\r\n", id="white-space"),
        pytest.param("Zoë ißt Brötchen für 3 €", id="latin"),
        pytest.param("日本語 и русский עברית", id="scripts"),
        pytest.param("🦊👩‍👩‍👧 e\u0301", id="emoji-and-combining"),
        pytest.param("\x00\x01\x7f", id="control"),
    ],
)
def test_tokenizer_is_the_utf8_bytes(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert ids == encode(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token_id == settings.EOS == 257
    assert tokenizer("a</s>b")["input_ids"] == [97, 257, 98] == encode("a</s>b")
    assert len(tokenizer) == settings.VOCAB


def test_chat_template_is_the_form_that_training_saw(tokenizer):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Be short.\nuser: Hi\nassistant: Hello!</s>\nuser: Who are you?\nassistant: "
    for seed in range(60):
        document = Writer.training().document_of("chat", random.Random(seed))
        again = tokenizer.apply_chat_template(_messages(document), tokenize=False)
        assert again == document + "</s>\n"


def _messages(chat: str) -> list[dict[str, str]]:
    """The turns of a training chat."""
    messages = []
    if chat.startswith("system: "):
        system, chat = chat.removeprefix("system: ").split("\n", 1)
        messages.append({"role": "system", "content": system})
    for turn in chat.split("</s>\n"):
        question, answer = turn.removeprefix("user: ").split("\nassistant: ", 1)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def test_committed_tokenizer_is_the_script_s(tokenizer):
    built = build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template


# --- the text ---


def _frames(name: str) -> dict[str, list[str]]:
    """Alternatives with at least five words beside their slots: the words of each."""
    frames = {}
    for rule in read_rules(TEXT / name):
        for text in rule.alternatives:
            words = re.findall(r"\w+", re.sub(r"\{[^}]*\}", " ", text).lower())
            if len(words) >= 5:
                frames[text] = words
    return frames


def test_held_out_frames_are_not_in_training():
    train, heldout = _frames("train.txt"), _frames("heldout.txt")
    assert len(train) > 300
    assert len(heldout) > 80
    near = [(h, t) for h, a in heldout.items() for t, b in train.items() if SequenceMatcher(None, a, b).ratio() > 0.75]
    assert not near


def test_training_text_is_the_same_for_a_seed_and_never_loops():
    first, again = training_rows(4, 400, 7, 1), training_rows(4, 400, 7, 1)
    assert (first == again).all()
    assert not (first == training_rows(4, 400, 8, 1)).all()
    sentences = re.findall(r"[^.!?]{20,}[.!?]", Writer.training().document_of("story", random.Random(3)))
    assert len(sentences) == len(set(sentences)) > 5


def test_grammar_remembers_and_does_not_repeat(tmp_path):
    path = tmp_path / "g.txt"
    path.write_text("# c\n[a]\n{^x:n} and {x}, {n}, {n}\n[n]\nowl | bee | ape\n", encoding="utf-8")
    text = Grammar.load(path).expand("a", Memory(random.Random(0)))
    first, second, *rest = re.findall(r"\w+", text.replace(" and", ""))
    assert first.lower() == second
    assert len({second, *rest}) == 3
    with pytest.raises(ValueError, match="defined twice"):
        Grammar([*read_rules(path), *read_rules(path)])
    assert articles("a owl, A ape, a bee, a one") == "an owl, An ape, a bee, a one"


def test_prompts_are_the_script_s_and_short():
    assert len(PROMPTS) >= 32
    assert len({p["prompt"] for p in PROMPTS}) == len(PROMPTS)
    made = heldout_prompts(len(PROMPTS), RECORD["seed"])
    assert [p["prompt"] for p in PROMPTS] == [p.prompt for p in made]
    assert all(len(p["prompt"].encode()) + 128 < 512 for p in PROMPTS)


def test_chat_prompts_are_what_the_template_makes(tokenizer):
    chats = [p for p in PROMPTS if "messages" in p]
    assert len(chats) >= 8
    for p in chats:
        made = tokenizer.apply_chat_template(p["messages"], tokenize=False, add_generation_prompt=True)
        assert made == p["prompt"]


# --- what the pair does ---


def test_held_out_bits_per_byte(target):
    documents = heldout_documents(32, RECORD["seed"])
    assert 0.6 <= evaluate.bits_per_byte(target, documents) <= 2.0
    # The floor of the scale: the measure is not blind to text that the target cannot know.
    rng = random.Random(0)
    noise = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(200)) for _ in range(2)]
    assert evaluate.bits_per_byte(target, noise) > 3.5


def test_greedy_outputs_are_readable_and_do_not_loop(runs):
    known = {w.lower() for w in Writer.training().words} | {w.lower() for w in _training_words()}
    words = []
    for run in runs:
        assert not evaluate.loops(run.output), bytes(t for t in run.output if t < 256)
        text = bytes(t for t in run.output if t < 256).decode()
        cut = len(run.output) == TOKENS
        words += re.findall(
            r"[^\W\d_]{2,}", text.split(" ", 1)[-1].rsplit(" ", 1)[0] if cut else text.split(" ", 1)[-1]
        )
    assert len(words) > 100
    assert sum(w.lower() in known for w in words) / len(words) > 0.97
    assert len(set(words)) > 60
    assert sum(len(run.output) == TOKENS for run in runs) >= 4


def _training_words() -> set[str]:
    writer, rng = Writer.training(), random.Random(1)
    return set(re.findall(r"[^\W\d_]+", " ".join(writer.document(rng) for _ in range(600))))


def test_accept_lengths(target, runs):
    draft = checkpoint.load_draft(models.TINY_DRAFT, torch.float32)
    eagle = evaluate.eagle_accept_length(target, draft, runs)
    assert eagle >= 2.5
    assert evaluate.eagle_accept_length(target, checkpoint.random_draft().float(), runs) <= 1.3
    assert eagle > evaluate.ngram_accept_length(runs)
    assert eagle > evaluate.lookup_accept_length(runs)


def test_card_states_what_the_script_recorded():
    card = (models.TINY_PAIR / "README.md").read_text(encoding="utf-8")
    for key in (
        "heldout_bits_per_byte",
        "accept_length_eagle3",
        "accept_length_random_draft",
        "accept_length_ngram_cache",
    ):
        assert f"{RECORD[key]:.2f}" in card, key
    for key in ("command", "date", "device", "torch"):
        assert RECORD[key] in card, key


# --- the measuring and the training code ---


def _run(prompt: str, output: str) -> evaluate.Run:
    return evaluate.Run(tuple(prompt.encode()), tuple(output.encode()))


def test_accept_length_counts_tokens_per_verify():
    run = _run("x", "abcdefghi")  # 'a' comes from the prefill; 8 tokens are left
    assert evaluate.accept_length([run], lambda r: lambda n: []) == 1.0
    assert evaluate.accept_length([run], lambda r: lambda n: r.output[n : n + 3]) == 4.0
    assert evaluate.accept_length([run], lambda r: lambda n: [r.output[n], 0, 0]) == 2.0


def test_prompt_lookup_repeats_what_followed():
    assert evaluate.lookup_accept_length([_run("abcdefgh abc", "defgh")]) == 4.0
    assert evaluate.lookup_accept_length([_run("ab", "abababab")]) > 3
    assert evaluate.lookup_accept_length([_run("abc", "xyzw")]) == 1.0


def test_ngram_cache_learns_from_earlier_requests():
    run = _run("qrs ", "the quick brown fox")
    alone = evaluate.ngram_accept_length([run])
    assert alone < 1.5
    assert evaluate.ngram_accept_length([run, run]) > alone + 0.5


def test_loop_detection():
    assert evaluate.loops(b"and then " + b"the cat sat. " * 3)
    assert evaluate.loops(b"a" * 30)
    assert not evaluate.loops(b"the cat sat. the dog sat. the cow sat.")


def test_unrolled_draft_equals_one_token_at_a_time():
    """The training-time test computes what the engine does: a chain of draft steps over a KV cache."""
    torch.manual_seed(0)
    draft, length, depth = Draft().double(), 7, 4
    embeds = torch.randn(1, length, settings.HIDDEN).double()
    captured = torch.randn(1, length, 3 * settings.HIDDEN).double()
    unrolled = draft(embeds, captured, depth)
    for base in range(length - depth + 1):
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p in range(base + 1):
            hidden = _one_token(draft, embeds[0, p], draft.fc(captured[0, p]), p, cache)
        for step in range(depth):
            if step:
                hidden = _one_token(draft, embeds[0, base + step], hidden, base + step, cache)
            logits = draft.lm_head(draft.norm(hidden))
            torch.testing.assert_close(logits, unrolled[step][0, base + step], atol=1e-6, rtol=1e-5)


def _one_token(draft, embed, hidden, position, cache):
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    x = torch.cat([layer.input_layernorm(embed), layer.hidden_norm(hidden)])

    def heads(projection):
        return projection(x).unflatten(0, (-1, settings.HEAD_DIM))

    def at_position(t):
        return rotate(t[:, None].expand(-1, position + 1, -1))[:, position]

    q, k, v = at_position(heads(attention.q_proj)), at_position(heads(attention.k_proj)), heads(attention.v_proj)
    cache.append((k, v))
    group = settings.HEADS // settings.KV_HEADS
    out = []
    for head in range(settings.HEADS):
        keys = torch.stack([k[head // group] for k, _ in cache])
        values = torch.stack([v[head // group] for _, v in cache])
        out.append((keys @ q[head] / settings.HEAD_DIM**0.5).softmax(0) @ values)
    hidden = hidden + attention.o_proj(torch.cat(out))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
