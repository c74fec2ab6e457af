"""A proxy that plants effects: it takes ``factor`` times as long as the server, and swaps one token for another."""

from __future__ import annotations

import asyncio
import re
import sys
import time

_IDS = re.compile(rb'"(?:token|output)_ids":\s*[\d,\s\[\]]+')


def swapped(data: bytes, token: bytes, other: bytes) -> bytes:
    """Put ``other``, which has as many digits, in the place of a token wherever ids are told."""
    return _IDS.sub(lambda found: re.sub(rb"\b%s\b" % token, other, found[0]), data)


async def main(upstream: int, factor: float, token: bytes, other: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        asked = time.monotonic()

        async def forward() -> None:
            nonlocal asked
            while data := await reader.read(65536):
                asked = time.monotonic()
                up_writer.write(data)
                await up_writer.drain()
            up_writer.close()

        async def back() -> None:
            # What has come waits in a queue, so that the upstream is never held up and the delays do not add up.
            queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

            async def receive() -> None:
                while data := await up_reader.read(65536):
                    queue.put_nowait((asked + (time.monotonic() - asked) * factor, swapped(data, token, other)))
                queue.put_nowait((0.0, b""))

            task = asyncio.create_task(receive())
            while (entry := await queue.get())[1]:
                await asyncio.sleep(entry[0] - time.monotonic())
                writer.write(entry[1])
                await writer.drain()
            await task

        try:
            await asyncio.gather(forward(), back())
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3].encode(), sys.argv[4].encode()))
