"""What an exchange of a large model takes at least here: bare sockets, copies and sums.

Two processes over loopback do what an exchange of DiLoCo between two regions cannot do without, for
the 0.398 GB of `benchmarks.runs.large_model`: one makes its update and sends it, the other makes
its own, takes the mean and the outer step and sends the answer, and both move their models. Pieces
of 1 MiB with the same tags (AES-GMAC) as geo_ray's frames; all memory is used again. There are no
headers, no acknowledgements, no processes between, and nobody else holds the model.

  bare_gb_per_s  size of the model over the seconds from when the later region begins until both
                 have merged; median of the rounds after the first
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Final

import torch
from torch import Tensor

from benchmarks.common import support
from geo_ray.base.memory import ReusedMemory
from geo_ray.strategies.outer import OuterNesterov, outer_round
from geo_ray.strategies.state import AveragerState, Update
from geo_ray.training.parameters import square_norm
from geo_ray.transport.wire.frames import TAG_BYTES, PayloadSealer

PARAMS: Final = 99_500_000
_CHUNK_BYTES: Final = 1024**2
_KEY: Final = bytes(32)
_BOTH: Final = ("here", "there")


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    found = measure(4 if options.quick else 11)
    rates = [4 * PARAMS / seconds / 1e9 for seconds in found[1:]]
    support.say(f"exchanges: {', '.join(f'{seconds:.2f}' for seconds in found)} s")
    support.finish(
        "bare_exchange", machine, [support.median("bare_gb_per_s", rates, "GB/s")], options.out
    )


def measure(rounds: int) -> list[float]:
    """Seconds of each round."""
    context = multiprocessing.get_context("spawn")
    pipes = {name: context.Pipe() for name in _BOTH}
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    processes = [
        context.Process(target=_region, args=(n, port, rounds, pipes[n][1])) for n in _BOTH
    ]
    for process in processes:
        process.start()
    spans: list[list[tuple[float, float]]] = [pipes[name][0].recv() for name in _BOTH]
    for process in processes:
        process.join()
    return [
        max(end for _, end in times) - max(begin for begin, _ in times)
        for times in zip(*spans, strict=True)
    ]


def _region(name: str, port: int, rounds: int, result: Connection) -> None:
    torch.set_num_threads(1)
    anchor_P, update_P = torch.randn(PARAMS), torch.empty(PARAMS)
    params_P, room_P = anchor_P.clone(), torch.empty(PARAMS)
    averager = AveragerState(_BOTH, allocate=ReusedMemory().tensor)
    sock = _listen(port) if name == "here" else _dial(port)
    times = []
    for _ in range(rounds):
        params_P.mul_(0.999)
        begin_s = time.time()
        torch.sub(anchor_P, params_P, out=update_P)
        if name == "there":
            _send(sock, update_P)
            change_P = _receive(sock, room_P)
        else:
            ours = Update("here", update_P, 1)
            theirs = Update("there", _receive(sock, room_P), 1)
            square_norm(theirs.payload_P)  # it is finite
            change_P = outer_round(averager, [ours, theirs], "uniform", OuterNesterov())[
                0
            ].payload_P
            _send(sock, change_P)
        anchor_P.sub_(change_P)
        params_P.copy_(anchor_P)
        times.append((begin_s, time.time()))
    result.send(times)
    sock.close()


def _listen(port: int) -> socket.socket:
    with socket.create_server(("127.0.0.1", port)) as listener:
        return listener.accept()[0]


def _dial(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.1)


def _send(sock: socket.socket, vector_P: Tensor) -> None:
    view = memoryview(vector_P.numpy().data).cast("B")
    for start in range(0, view.nbytes, _CHUNK_BYTES):
        piece = view[start : start + _CHUNK_BYTES]
        sealer = PayloadSealer(bytes(16), _KEY)
        sealer.update(piece)
        sock.sendall(piece)
        sock.sendall(sealer.tag())


def _receive(sock: socket.socket, room_P: Tensor) -> Tensor:
    view, tag = memoryview(room_P.numpy().data).cast("B"), bytearray(TAG_BYTES)
    for start in range(0, view.nbytes, _CHUNK_BYTES):
        piece = view[start : start + _CHUNK_BYTES]
        for part in (piece, memoryview(tag)):
            got = 0
            while got < part.nbytes:
                got += sock.recv_into(part[got:], 0, socket.MSG_WAITALL)
        sealer = PayloadSealer(bytes(16), _KEY)
        sealer.update(piece)
        if sealer.tag() != tag:
            raise RuntimeError("the bare exchange is wrong")
    return room_P


if __name__ == "__main__":
    main()
