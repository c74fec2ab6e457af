"""`--trust-remote-code` runs at a commit that somebody named or trusted before, and at no other."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sglang_bw.cli import cli
from sglang_bw.errors import BwError, OutputError, UnsafeLaunchError
from sglang_bw.launch import command as commands
from sglang_bw.launch import pins, remote_code
from sglang_bw.launch.command import Command
from sglang_bw.launch.remote_code import Consent
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.flags import Flag
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe
from tests.launch import fake_hub
from tests.launch.fake_hub import Hub
from tests.launch.serving import Serve, free_port, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
NEWER = "00112233445566778899aabbccddeeff00112233"
NAME = "minimax-m2.7-nvfp4-eagle3"
DRAFT = {"draft": "org/draft", "spec": {"steps": 3, "topk": 1, "draft_tokens": 4}}
YES = Consent(given=True)


def command(*extra: str, **recipe: object) -> Command:
    fields = {"id": "my", "target": "org/model", "args": {"trust-remote-code": True}, **recipe}
    return commands.build(Recipe.model_validate(fields), Hardware(device="cuda"), {}, extra=flags.parse(extra))


def settle(launch: Command, environ: dict[str, str], consent: Consent | None = None) -> remote_code.Settled:
    return remote_code.settle(launch, environ, consent or Consent())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def offline(cache: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def online(cache: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub with two models, and an empty cache."""
    with fake_hub.running() as hub:
        hub.models = {"org/model": {"config.json": b"{}"}, "org/draft": {"config.json": b"{}"}}
        hub.commits = {"org/draft": OTHER}
        yield hub, {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.url}


def cached(cache: Path, name: str, commit: str, ref: str = "main", **files: str) -> Path:
    """Lay a model into a cache as the hub's library does: blobs, a snapshot of links, a ref."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for each in (folder / "blobs", snapshot, folder / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    for number, (file, text) in enumerate({"config__json": "{}", **files}.items()):
        blob = folder / "blobs" / f"{commit[:8]}{number}"
        blob.write_text(text)
        (snapshot / file.replace("__", ".")).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs" / ref).write_text(commit)
    return snapshot


def refused(launch: Command, environ: dict[str, str], consent: Consent | None = None) -> UnsafeLaunchError:
    with pytest.raises(UnsafeLaunchError) as caught:
        settle(launch, environ, consent)
    return caught.value


# What is found -------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_without_the_flag() -> None:
    assert settle(command(args={}), {}) == remote_code.Settled()
    assert settle(command("--no-trust-remote-code", args={}), {}) == remote_code.Settled()


def test_the_flag_in_every_form_that_the_engine_takes(tmp_path: Path, offline: dict[str, str]) -> None:
    config = tmp_path / "engine.yaml"
    for text in ("trust-remote-code: true", "trust_remote_code: true"):
        config.write_text(text)
        assert "no commit is pinned" in refused(command("--config", str(config), args={}), offline).message
    for name in ("--trust-rem", "--trust-remote", "--trust-remote-code"):
        assert "no commit is pinned" in refused(command(name, args={}), offline).message
    config.write_text("trust-remote-code: false\nport: 1")
    for harmless in (("--config", str(config)), ("--trust-mm-content-hashes",)):
        assert settle(command(*harmless, args={}), offline) == remote_code.Settled()


def test_a_whole_commit_on_the_command_line_is_enough(offline: dict[str, str]) -> None:
    told = settle(command("--revision", COMMIT), offline).told
    assert told == ("code of org/model at 0123456789ab will run (trust-remote-code)",)
    both = command("--revision", COMMIT, "--speculative-draft-model-revision", OTHER, **DRAFT)
    assert len(settle(both, offline).told) == 2
    assert "draft org/draft: no commit" in refused(command("--revision", COMMIT, **DRAFT), offline).message
    assert not list(pins.root().glob("*"))


@pytest.mark.parametrize("revision", [(), ("--revision", "main"), ("--revision", COMMIT[:12])])
def test_what_may_change_is_refused(revision: tuple[str, ...], offline: dict[str, str]) -> None:
    problem = refused(command(*revision), offline)
    assert "no commit is pinned" in problem.message
    assert "HF_HUB_OFFLINE is set" in problem.message
    assert "--revision COMMIT" in problem.hint
    assert "--pin` trusts it" not in problem.hint  # there is nothing that it could pin


def test_the_cache_comes_first(cache: Path, online: tuple[Hub, dict[str, str]]) -> None:
    hub, environ = online
    cached(cache, "org/model", NEWER)
    problem = refused(command(), environ, Consent(again="sglang-bw serve my --pin"))
    assert f"target: commit {NEWER}, which is in {cache}" in problem.message
    assert "`sglang-bw serve my --pin` trusts it" in problem.hint
    assert f"{hub.url}/org/model/tree/{NEWER}" in problem.hint
    assert f"-- --revision {NEWER}" in problem.hint
    assert hub.requests == []


def test_the_hub_is_asked_for_what_the_cache_lacks(cache: Path, online: tuple[Hub, dict[str, str]]) -> None:
    hub, environ = online
    cached(cache, "org/model", NEWER, ref="dev")  # another branch says nothing of main
    problem = refused(command(**DRAFT), environ)
    assert f"target: commit {COMMIT}, which {hub.url} has now" in problem.message
    assert f"draft: commit {OTHER}, which {hub.url} has now" in problem.message
    assert refused(command("--revision", "dev"), environ).message.count(NEWER) == 1
    assert not pins.root().exists()


@pytest.mark.parametrize("text", ["", "main", "../../etc", COMMIT[:12], COMMIT + "0", "\xff"])
def test_a_ref_that_is_no_commit_is_none(text: str, cache: Path, offline: dict[str, str]) -> None:
    cached(cache, "org/model", COMMIT)
    (cache / "models--org--model" / "refs" / "main").write_text(text, encoding="latin-1")
    assert "no commit was found" in refused(command(), offline).message


def test_why_no_commit_was_found(online: tuple[Hub, dict[str, str]]) -> None:
    hub, environ = online
    hub.commits["org/model"] = "main"
    assert "answers no commit: 'main'" in refused(command(), environ, YES).message
    assert "does not give org/other to you" in refused(command("--model-path", "org/other"), environ, YES).message
    hub.status = 500
    assert "the hub answers 500" in refused(command(), environ).message
    gone = {**environ, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    assert "the hub cannot be reached" in refused(command(), gone).message
    assert "ModelScope" in refused(command(), {"SGLANG_USE_MODELSCOPE": "true"}).message
    tokenizer = command("--revision", COMMIT, "--tokenizer-path", "org/tokenizer")
    assert "the engine takes no commit for it" in refused(tokenizer, environ, YES).message
    assert not pins.root().exists()


# What is trusted -----------------------------------------------------------------------------------------------------


def test_consent_is_remembered(cache: Path, online: tuple[Hub, dict[str, str]], offline: dict[str, str]) -> None:
    _, environ = online
    settled = settle(command(**DRAFT), environ, YES)
    assert settled.flags == (Flag("revision", (COMMIT,)), Flag("speculative-draft-model-revision", (OTHER,)))
    assert f"code of org/draft at {OTHER}, which " in settled.told[1]
    files = sorted(pins.root().iterdir())
    assert [path.name for path in files] == ["org--draft@main.json", "org--model@main.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(pins.root().stat().st_mode) == 0o700
    later = remote_code.with_records(command(**DRAFT))
    assert flags.value(later.flags, "revision") == COMMIT
    assert flags.value(later.flags, "speculative-draft-model-revision") == OTHER
    told = settle(later, offline).told
    assert [line.partition(", trusted here on ")[0] for line in told] == [
        "code of org/model at 0123456789ab will run (trust-remote-code",
        "code of org/draft at fedcba987654 will run (trust-remote-code",
    ]
    remote_code.demand(later, offline)
    # Another branch, another model, and no draft.
    assert remote_code.recorded(command("--revision", "dev")) == ()
    assert remote_code.recorded(command("--model-path", "org/other")) == ()
    assert remote_code.recorded(command()) == (Flag("revision", (COMMIT,)),)
    assert remote_code.recorded(command(args={})) == ()
    (pins.root() / "org--model@main.json").unlink()
    assert "no commit is pinned" in refused(remote_code.with_records(command()), offline).message


def test_nothing_is_recorded_by_halves(cache: Path, offline: dict[str, str]) -> None:
    cached(cache, "org/model", COMMIT)
    assert "draft: no commit was found" in refused(command(**DRAFT), offline, YES).message
    assert not pins.root().exists()


def test_a_hub_that_moves_on_is_told_and_not_followed(cache: Path, online: tuple[Hub, dict[str, str]]) -> None:
    hub, environ = online
    settle(command(), environ, YES)
    hub.commits["org/model"] = NEWER
    later = remote_code.with_records(command())
    assert flags.value(later.flags, "revision") == COMMIT
    told = settle(later, environ, YES).told
    assert told[1] == (
        f"{hub.url} has moved on to {NEWER} of org/model, which is not followed; `--pin -- --revision {NEWER}` does"
    )
    settle(command("--revision", NEWER), environ, YES)
    assert remote_code.recorded(command()) == (Flag("revision", (NEWER,)),)
    hub.status = 500  # that is good to know, and no reason to fail
    assert len(settle(remote_code.with_records(command()), environ).told) == 1
    hub.requests.clear()
    settle(remote_code.with_records(command()), {**environ, "HF_HUB_OFFLINE": "1"})
    assert hub.requests == []


def test_a_commit_of_another_branch_stays_there(online: tuple[Hub, dict[str, str]]) -> None:
    _, environ = online
    settle(command("--revision", "v1.0/beta"), environ, YES)
    assert (pins.root() / "org--model@v1.0--beta.json").is_file()
    settle(remote_code.with_records(command("--revision", "v1.0/beta")), environ, YES)
    assert remote_code.recorded(command()) == ()
    settle(command("--revision", NEWER), environ, YES)  # as the line about a hub that has moved on says
    assert remote_code.recorded(command("--revision", "v1.0/beta")) == (Flag("revision", (NEWER,)),)
    assert remote_code.recorded(command()) == ()


@pytest.mark.parametrize("text", ["", "{", '{"commit": "main"}', json.dumps({"model": "org/evil"})])
def test_a_damaged_record_is_no_consent(text: str, online: tuple[Hub, dict[str, str]]) -> None:
    _, environ = online
    settle(command(), environ, YES)
    [path] = pins.root().iterdir()
    path.write_text(text)
    with pytest.raises(UnsafeLaunchError, match="it is damaged") as caught:
        remote_code.with_records(command())
    assert str(path) in caught.value.message


def test_a_record_counts_for_its_own_model(online: tuple[Hub, dict[str, str]]) -> None:
    _, environ = online
    settle(command(), environ, YES)
    [path] = pins.root().iterdir()
    path.rename(pins.place("org/other", "main"))
    with pytest.raises(UnsafeLaunchError, match="it is of org/model"):
        remote_code.with_records(command("--model-path", "org/other"))


def test_a_record_that_cannot_be_written(online: tuple[Hub, dict[str, str]], tmp_path: Path) -> None:
    _, environ = online
    pins.root().parent.mkdir(parents=True)
    pins.root().write_text("in the way")
    with pytest.raises(OutputError, match="cannot be written"):
        settle(command(), environ, YES)


def test_a_half_written_record_is_never_seen(
    online: tuple[Hub, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, environ = online
    settle(command(), environ, YES)

    def killed(_number: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sglang_bw.launch.pins.os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            pins.record("org/model", "main", NEWER)
    assert remote_code.recorded(command()) == (Flag("revision", (COMMIT,)),)
    pins.record("org/model", "main", NEWER)  # what the killed one left is no hindrance
    assert remote_code.recorded(command()) == (Flag("revision", (NEWER,)),)


# Code of this disk ---------------------------------------------------------------------------------------------------


def test_a_directory_that_was_pinned_may_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "modeling.py").write_text("x = 1\n")
    launch = command("--model-path", str(folder))
    [told] = settle(launch, {}).told
    assert told.startswith(f"code that lies in {folder} will run (trust-remote-code; sha256:")
    assert not pins.root().exists()  # it is the user's own: it runs unpinned
    assert "is trusted from now on" in settle(launch, {}, YES).told[0]
    assert "trusted here on " in settle(launch, {}).told[0]
    (folder / "README.md").write_text("no code")
    (folder / "model.safetensors").write_bytes(b"weights")
    settle(launch, {})
    for path, text in (("sub/modeling.py", "x = 2\n"), ("config.json", '{"a": 1}'), ("new.py", "")):
        before = (folder / path).read_bytes() if (folder / path).exists() else None
        (folder / path).write_text(text)
        assert "is not what you trusted on" in refused(launch, {}).message
        with pytest.raises(UnsafeLaunchError):
            remote_code.demand(launch, {})
        (folder / path).unlink() if before is None else (folder / path).write_bytes(before)
    (folder / "sub" / "modeling.py").write_text("x = 3\n")
    assert "is trusted from now on" in settle(launch, {}, YES).told[0]
    settle(launch, {})


def test_what_comes_with_the_tool_is_the_tool(offline: dict[str, str]) -> None:
    launch = commands.build(lookup.find("tiny"), Hardware(device="cpu"), {}, extra=(Flag("trust-remote-code"),))
    assert settle(launch, offline, YES) == remote_code.Settled()  # an upgrade may change it


def test_code_of_a_third_party_is_told(cache: Path, tmp_path: Path, offline: dict[str, str]) -> None:
    auto = {"AutoConfig": "org/model--configuration.C", "AutoModel": "evil/code--modeling.M"}
    tokens = {"AutoTokenizer": ["evil/tokens--tokenization.T", None]}
    cached(
        cache,
        "org/model",
        COMMIT,
        config__json=json.dumps({"auto_map": auto}),
        tokenizer_config__json=json.dumps({"auto_map": tokens}),
    )
    told = list(remote_code.elsewhere(command("--revision", COMMIT), offline))
    assert told == [
        "the target org/model takes code of evil/code, whose commit nothing pins",
        "the target org/model takes code of evil/tokens, whose commit nothing pins",
    ]
    assert list(remote_code.elsewhere(command("--revision", COMMIT, args={}), offline)) == []
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('["auto_map"]')
    (folder / "tokenizer_config.json").write_text("{")
    assert list(remote_code.elsewhere(command("--model-path", str(folder)), offline)) == []


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, online: tuple[Hub, dict[str, str]]) -> Hub:
    """A hub that has the models of a bundled recipe."""
    hub, environ = online
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    recipe = lookup.find(NAME)
    assert recipe.draft
    hub.models |= {str(weights.id): {"config.json": b"{}"} for weights in (recipe.target, recipe.draft)}
    return hub


def run(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, list(arguments))
    if isinstance(done.exception, BwError):
        assert done.exception.exit_code == code
    else:
        assert done.exit_code == code, done.output
    return done


def test_plan_says_that_serve_will_ask(large: Hub) -> None:
    plan = ("plan", NAME, "--no-resolve", "--force")
    [warning] = json.loads(run(*plan, "--json").stdout)["warnings"]
    assert warning.startswith("`serve` will ask for a commit: trust-remote-code runs code of the target ")
    assert f"`sglang-bw serve {NAME} --pin`" in warning
    assert "`serve` will ask for a commit" in run(*plan).stdout
    assert large.requests == []
    run("serve", NAME, "--pin", "--emit", "compose", "--no-check")
    planned = json.loads(run(*plan, "--json").stdout)
    assert planned["warnings"] == []
    assert planned["argv"].count(COMMIT) == 2
    assert json.loads(run("plan", "tiny", "--gpus", "1x5090", "--no-resolve", "--json").stdout)["warnings"] == []


def test_a_dry_run_shows_the_commit_and_records_nothing(large: Hub) -> None:
    dry = ("serve", NAME, "--device", "cuda", "--dry-run")
    done = run(*dry)
    assert "`serve` will refuse this" in done.stderr
    assert "the hub was not asked" in done.stderr
    assert "--revision" not in done.stdout
    assert large.requests == []
    shown = run(*dry, "--pin")
    assert f"--revision {COMMIT}" in shown.stdout
    assert f"--speculative-draft-model-revision {COMMIT}" in shown.stdout
    assert "nothing is recorded now" in shown.stderr
    assert not pins.root().exists()
    run("serve", NAME, "--pin", "--emit", "compose", "--no-check")
    assert f"--revision {COMMIT}" in run(*dry).stdout
    assert COMMIT in json.loads(run(*dry, "--json").stdout)["argv"]


@pytest.mark.parametrize("form", ["compose", "kubernetes", "systemd"])
def test_an_emitted_file_carries_the_commit(form: str, large: Hub) -> None:
    emit = ("serve", NAME, "--emit", form, "--no-check")
    assert isinstance(run(*emit, code=91).exception, UnsafeLaunchError)
    first = run(*emit, "--pin").stdout
    large.commits[next(iter(large.models))] = NEWER
    for text in (first, run(*emit).stdout):
        words = text.replace("- ", " ").replace("'", "").split()
        for option in ("--revision", "--speculative-draft-model-revision"):
            assert words.count(option) == 1
            assert words[words.index(option) + 1] == COMMIT
    # What was typed behind the dashes stays, and wins.
    own = run(*emit, "--", "--revision", OTHER).stdout
    assert own.count(OTHER) == 1
    assert COMMIT in own  # the draft's


def test_the_next_command_is_this_one_with_consent(large: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = lookup.find(NAME)
    assert recipe.draft
    for weights in (recipe.target, recipe.draft):
        cached(Path(os.environ["HF_HUB_CACHE"]), str(weights.id), COMMIT)
    words = ["serve", NAME, "--device", "cuda", "--dry-run", "--", "--chat-template", "a b"]
    monkeypatch.setattr("sys.argv", ["sglang-bw", *words])
    said = run(*words).stderr
    assert f"`sglang-bw serve {NAME} --device cuda --pin -- --chat-template 'a b'` trusts it" in said
    monkeypatch.setattr("sys.argv", ["sglang-bw", *words, "--api-key", "k3y"])
    said = run(*words, "--api-key", "k3y").stderr
    assert f"`sglang-bw serve {NAME} --pin` trusts it" in said  # no key is repeated
    assert "k3y" not in said


def test_serve_asks_once(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it: refused with the next command, started by that command, then started without asking."""
    weights = write_model(tmp_path / "weights")
    with fake_hub.running() as hub:
        hub.add("org/model", weights, modeling__py=b"x = 1\n")
        hub.add("org/draft", weights)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        options = ("--model-path", "org/model", "--draft", "org/draft", "--no-warmup")
        trusting = ("--", "--trust-remote-code")
        serve.start(*options, *trusting)
        assert serve.wait() == 91
        assert f"target: commit {fake_hub.COMMIT}, which {hub.url} has now" in serve.err
        assert "--no-warmup --pin -- --trust-remote-code` trusts it" in serve.err
        assert not serve.pids
        assert hub.fetched() == []
        serve.start(*options, "--pin", *trusting)
        serve.until_out("http://")
        serve.send(signal.SIGTERM)
        assert serve.wait() == 0
        assert f"code of org/model at {fake_hub.COMMIT}, which {hub.url} has now, is trusted from now on" in serve.err
        assert f"--revision {fake_hub.COMMIT}" in serve.log.read_text()
        serve.log.unlink()
        hub.commits["org/model"] = NEWER
        serve.start(*options, *trusting)
        serve.until_out("http://")
        serve.send(signal.SIGTERM)
        assert serve.wait() == 0
        assert f"--revision {fake_hub.COMMIT}" in serve.log.read_text()
        assert f"has moved on to {NEWER} of org/model" in serve.err
        assert serve.err.count("trusted here on") == 2


def test_experiments_start_nothing_that_is_not_pinned(
    fake_tree: Path, online: tuple[Hub, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in online[1].items():
        monkeypatch.setenv(name, value)
    recipe = tmp_path / "my.yaml"
    recipe.write_text("id: my\ntarget: org/model\nargs: {trust-remote-code: true}\n")
    common = ("--engine-tree", str(fake_tree), "--device", "cpu")
    ab = run("ab", str(recipe), "--set", "max-running-requests=4", *common, code=91)
    assert "no commit is pinned" in str(ab.exception)
    assert online[0].requests == []
    settle(command(), online[1], YES)
    shown = run("ab", str(recipe), "--set", "max-running-requests=4", *common, "--dry-run")
    assert shown.output.count(COMMIT) == 2
