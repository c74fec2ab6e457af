"""Stands in for ``sglang.launch_server``: the same processes, log lines and endpoints, in half a second.

It becomes ``sglang/launch_server.py`` of a tree that the tests build. FAKE_MODE says how it misbehaves; every
process appends its pid to the file FAKE_PIDS names.
"""

import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

MODE = os.environ.get("FAKE_MODE", "")
SLEEPER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
# A grandchild in a session of its own, whose parent is gone at once: the hardest orphan to find.
DAEMON = (
    "import os, sys, time\nif os.fork(): sys.exit(0)\nos.setsid()\n"
    "open(os.environ['FAKE_PIDS'], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
)
SCHEDULER_KILLED = """Traceback (most recent call last):
  File "engine.py", line 2031, in _wait_for_scheduler_ready
    data = scheduler_pipe_readers[i].recv()
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "launch_server.py", line 48, in <module>
    run_server(server_args)
RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common \
cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."""
KEY = ""
ready = threading.Event()
requests = []


def say(text):
    print(f"[2026-11-29 16:57:44] {text}", file=sys.stderr, flush=True)


def note(pid):
    with pathlib.Path(os.environ["FAKE_PIDS"]).open("a") as file:
        file.write(f"{pid}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        locked = KEY and self.path != "/health" and self.headers["Authorization"] != f"Bearer {KEY}"
        self.answer(info() if self.path == "/server_info" else {}, 401 if locked else 200 if ready.is_set() else 503)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        requests.append((self.path, body))
        if MODE == "no-chat" and self.path.startswith("/v1"):
            return self.answer({"error": "no chat template"}, 400)
        if KEY and self.headers["Authorization"] != f"Bearer {KEY}":
            return self.answer({}, 401)
        if MODE == "crash-when-asked" or (MODE == "crashes-at-2" and len(body["text"]) == 2):
            traceback("RuntimeError: CUDA error: an illegal memory access was encountered")
            os._exit(7)
        if isinstance(body.get("text"), list):
            return self.answer(batch(body))
        ids = [65] * 64 if MODE == "loop" else [65 + n % 26 for n in range(64)]
        logprobs = [[None if MODE == "nan" else -0.5, token, None] for token in ids]
        if MODE in ("odd-types", "odd-rows"):
            logprobs = [None] if MODE == "odd-types" else [[-0.5]]
        meta = {"completion_tokens": 64, "output_token_logprobs": logprobs}
        if "--speculative-algorithm" in sys.argv:
            meta |= {"spec_verify_ct": 20, "spec_num_correct_drafts": 0 if MODE == "useless" else 44}
        if self.path == "/generate":
            return self.answer({"text": "text", "meta_info": meta})
        return self.answer({"choices": [{"message": {"content": "text"}, "meta_info": meta}]})

    def answer(self, value, code=200):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def info():
    speculates = "--speculative-algorithm" in sys.argv
    return {
        "model_path": value("--model-path"),
        "version": "0.5.23",
        "device": "cpu",
        "max_running_requests": int(os.environ.get("FAKE_MOST", "64")),
        "speculative_algorithm": "EAGLE3" if speculates else None,
        "speculative_num_steps": int(value("--speculative-num-steps")) if speculates else None,
    }


def batch(body):
    """Decode as an engine with a simulated accept length does: a round takes 2 ms, a plain step 1 ms."""
    if MODE == "never-answers":
        time.sleep(600)
    tokens = body["sampling_params"]["max_new_tokens"]
    length = 1.0 if MODE == "ignores-simulation" else float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "1"))
    rounds = math.ceil(tokens / length)
    speculates = "--speculative-algorithm" in sys.argv
    time.sleep(rounds * (0.002 if speculates else 0.001))
    meta = {"completion_tokens": tokens, "prompt_tokens": 5}
    return [{"text": "", "meta_info": meta | ({"spec_verify_ct": rounds} if speculates else {})} for _ in body["text"]]


def traceback(last):
    say(
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "scheduler.py", line 568, in run_scheduler_process\n    scheduler = Scheduler(server_args)\n'
        f"{last}\n"
    )


def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]


def listen(port):
    while MODE == "waits" and not pathlib.Path(os.environ["FAKE_PIDS"]).with_name("go").exists():
        time.sleep(0.05)
    try:
        return ThreadingHTTPServer((value("--host"), port), Handler)
    except OSError:
        say(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use")
        sys.exit(1)


def take_key():
    """As SGLang takes it from the file that --config names; stock writes it into its log."""
    global KEY
    if "--config" not in sys.argv:
        return
    KEY = yaml.safe_load(pathlib.Path(value("--config")).read_text()).get("api-key", "")
    print(f"server_args={{'api_key': '{KEY}'}}", end="", flush=True)
    print(f", cut {KEY[:3]}", end="", flush=True)
    time.sleep(0.2)
    print(KEY[3:], flush=True)


def main():
    note(os.getpid())
    take_key()
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0 if ready.is_set() else 143))
    code = STUBBORN if MODE == "stubborn" else SLEEPER
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    for child in children:
        note(child.pid)
    subprocess.run([sys.executable, "-c", DAEMON], check=True)
    say("Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'")
    say("Load weight begin. avail mem=18.86 GB")
    if MODE == "scheduler-killed":  # as the kernel does when memory runs out: only the parent has words
        print(SCHEDULER_KILLED, file=sys.stderr, flush=True)
        sys.exit(1)
    if MODE == "fails":
        traceback("ValueError: the draft does not fit the target")
        say("Received sigquit from a child process. It usually means the child failed.")
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "hangs" or MODE == "stubborn":
        time.sleep(600)
    say("Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4")
    if MODE == "compiles":
        folder = (
            pathlib.Path(os.environ["FAKE_PIDS"]).parent
            / "sm90a"
            / "sgl_kernel_jit_marlin"
            / "build-7a8d"
            / ".staging-1"
        )
        folder.mkdir(parents=True)
        compiler = shutil.copy("/bin/sleep", folder / "nvcc")
        subprocess.run([compiler, "600"], cwd=folder)
    port = int(value("--port"))
    server = listen(port)
    say(f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)")
    threading.Timer(0.3, lambda: (ready.set(), say("The server is fired up and ready to roll!"))).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        os._exit(3)


if __name__ == "__main__":
    main()
