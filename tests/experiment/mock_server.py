"""A server that streams as SGLang does, in a process of its own, and misbehaves when it is told to.

Bare sockets and prepared bytes: it must cost less than the client that is measured. It answers any prompt with
``max_tokens`` tokens whose ids are made from the prompt, so two servers agree unless one is told to differ.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass

TALLIES = {"nine": {"prompt_tokens": "nine"}, "negative": {"completion_tokens": -5}}


@dataclass
class Behaviour:
    """How the server answers.

    :ivar token_s: seconds between two events.
    :ivar burst: tokens an event.
    :ivar speculative: say that it speculates, three draft steps.
    :ivar adapts: have a policy that changes its steps with every sixth request.
    :ivar fault: what goes wrong, from request ``fault_after`` on.
    :ivar differs_at: token position at which its answers differ from other servers'.
    :ivar ids: give token ids, which engines up to 0.5.16 do not.
    :ivar slower: factor on ``token_s`` that grows by itself with every request (a machine that drifts).
    """

    port: int = 0
    token_s: float = 0.002
    burst: int = 1
    speculative: bool = False
    adapts: bool = False
    fault: str = ""
    fault_after: int = 0
    differs_at: int = -1
    slower: float = 0.0
    version: str = "0.5.23+bw.1"
    stamps: bool = False
    ids: bool = True
    kv_tokens: int = 16384


class Mock:
    def __init__(self, behaviour: Behaviour) -> None:
        self.be = behaviour
        self.requests = 0
        self.running = 0
        self.flushed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode().split("\r\n")
                length = next((int(f.split(":")[1]) for f in fields if f.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.answer(line.split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        if path == "/server_info":
            return self.reply(writer, self.info())
        if path.startswith("/flush_cache"):
            return await self.flush(writer)
        if path == "/v1/loads":
            return self.reply(writer, {"loads": [{"token_usage": 0.25 if self.running else 0.0}]})
        if not path.startswith("/v1/c"):
            return self.reply(writer, {"requests": self.requests, "flushed": self.flushed})
        self.requests += 1
        fault = self.be.fault if self.requests > self.be.fault_after else ""
        if fault == "500":
            return self.reply(writer, {"error": {"message": "CUDA error: out of memory"}}, 500)
        if fault == "context":
            text = "The input (9000 tokens) is longer than the model's context length (2048 tokens)."
            return self.reply(writer, {"object": "error", "message": text, "code": 400}, 400)
        if fault == "400":
            return self.reply(writer, {"object": "error", "message": "no tools here", "code": 400}, 400)
        if fault == "never":
            await asyncio.sleep(600)
        self.running += 1
        try:
            return await self.generate(body, writer, fault)
        finally:
            self.running -= 1

    async def flush(self, writer: asyncio.StreamWriter) -> None:
        self.flushed += 1
        fault = self.be.fault if self.requests >= self.be.fault_after else ""
        if fault == "dies-idle":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs-idle":
            await asyncio.sleep(600)
        self.reply(writer, "flushed")

    async def generate(self, body: dict, writer: asyncio.StreamWriter, fault: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = "messages" in body
        ids = self.tokens(body, fault)
        pace = self.be.token_s * (1 + self.be.slower * self.requests)
        # Many streams: out of step, as an engine's own event loop spaces them out.
        began = time.monotonic() - (self.requests % 64 / 64 * pace if self.be.stamps else 0)
        for events, start in enumerate(range(0, len(ids), self.be.burst), 1):
            if pace:
                await asyncio.sleep(max(0.0, began + events * pace - time.monotonic()))
            if events == 3 and fault:
                if fault == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault in ("cut", "garbage", "binary", "no-json", "error", "odd", "deep", "infinite"):
                    break
                if fault == "stalls":
                    await asyncio.sleep(600)
            part = ids[start : start + self.be.burst]
            self.event(writer, {"choices": [self.choice(part, chat)], "usage": self.usage(start + len(part))})
            await writer.drain()
        broken = {
            "cut": b"",
            "garbage": b"<html>502 Bad Gateway</html>\n\n",
            "binary": b"data: \xff\xfe\n\n",
            "no-json": b'data: {"choices": [\n\n',
            "odd": b'data: {"choices": [17]}\n\n',
            "deep": b"data: " + b"[" * 200_000 + b"\n\n",
            "infinite": b'data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n',
            "error": b'data: {"error": {"message": "Generation aborted.", "code": 500}}\n\n',
        }
        if fault in broken:
            self.chunk(writer, broken[fault])
        else:
            self.end(writer, ids, chat, fault)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def tokens(self, body: dict, fault: str) -> list[int]:
        asked = json.dumps(body.get("messages") or body["prompt"])
        ids = [(sum(asked.encode()) + 7 * n) % 200 + 10 for n in range(body["max_tokens"])]
        if self.be.differs_at >= 0:
            ids[self.be.differs_at :] = [token + 1 for token in ids[self.be.differs_at :]]
        return [] if fault == "empty" else ids

    def choice(self, part: list[int], chat: bool) -> dict:
        text = str(time.perf_counter()) if self.be.stamps else "".join(map(chr, part))
        if chat:
            return {"index": 0, "delta": {"content": text}}
        return {"index": 0, "text": text} | ({"token_ids": part} if self.be.ids else {})

    def end(self, writer: asyncio.StreamWriter, ids: list[int], chat: bool, fault: str) -> None:
        finish = {
            "abort": "abort",
            "abort-native": {"type": "abort", "message": "The engine ends"},
            "native": {"type": "length", "length": len(ids)},
            "no-reason": {"kind": 7},
        }.get(fault, "length")
        self.event(writer, {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": finish}]})
        extension: dict = {"output_ids": [ids]} if chat and self.be.ids else {}
        if self.be.speculative:
            rounds = max(1, len(ids) // 3)
            extension["spec_tokens_details"] = {
                "spec_verify_ct": rounds,
                "spec_num_correct_drafts": 2 * rounds,
                "spec_correct_drafts_histogram": [0, 0, rounds, 0],
            }
        self.event(writer, {"choices": [], "sglext": extension})
        if fault != "no-usage":
            self.event(writer, {"choices": [], "usage": self.usage(len(ids)) | TALLIES.get(fault, {})})
        self.chunk(writer, b"data: [DONE]\n\n")

    def usage(self, tokens: int) -> dict:
        return {} if self.be.fault == "no-usage" else {"prompt_tokens": 9, "completion_tokens": tokens}

    def event(self, writer: asyncio.StreamWriter, value: dict) -> None:
        self.chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        if data:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def reply(self, writer: asyncio.StreamWriter, value: object, code: int = 200) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    def info(self) -> dict:
        spec = {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
        switches = self.requests // 6
        policy = {"steps": 3 - 2 * (switches % 2), "switches": switches, "round_ratio": 1.5, "reason": "batch 1: pays"}
        usage = {
            "weight": 1.5,
            "kvcache": 0.25,
            "startup_available": 9.0,
            "graph": {"decode": 0.5, "draft_decode": 0.25},
        }
        return {
            "version": self.be.version,
            "model_path": "mock",
            "disable_cuda_graph": False,
            "max_total_num_tokens": self.be.kv_tokens,
            "internal_states": [
                {
                    "decode_cuda_graph_bs": [1, 2, 4],
                    "memory_usage": usage,
                    **({"spec_adaptive": policy} if self.be.adapts else {}),
                }
            ],
            **{f"speculative_{key}": value if self.be.speculative else None for key, value in spec.items()},
        }


async def main() -> None:
    mock = Mock(Behaviour(**json.loads(sys.argv[1])))
    server = await asyncio.start_server(mock.serve, "127.0.0.1", mock.be.port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def arguments(behaviour: Behaviour) -> str:
    return json.dumps(asdict(behaviour))


if __name__ == "__main__":
    asyncio.run(main())
