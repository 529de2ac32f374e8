"""Nodes whose calls are timed; other processes import this, too."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np


class Echo:
    """Gives back what it is given."""

    def same(self, value: Any) -> Any:
        """The same."""
        return value


class Caller:
    """Calls a node again and again."""

    def __init__(self, echo: Any, calls: int) -> None:
        self._echo, self._calls = echo, calls

    def run(self) -> dict[str, float]:
        """Seconds of a call, by what it carries; of several at once, per call."""
        found = timed(self._echo.same, self._calls)
        begin = self._echo.futures.same
        began_s = time.perf_counter()
        for _ in range(self._calls // 16):
            for future in [begin(b"8 bytes.") for _ in range(16)]:
                future.result()
        found["futures"] = (time.perf_counter() - began_s) / (self._calls // 16 * 16)
        return found


def timed(call: Callable[[Any], Any], calls: int) -> dict[str, float]:
    """Median seconds of a call with 8 bytes and with an array of 1 MiB."""
    found = {}
    values = {"small": (b"8 bytes.", calls), "mib": (np.zeros(2**20, np.uint8), calls // 10)}
    for name, (value, count) in values.items():
        for _ in range(20):
            call(value)
        seconds = []
        for _ in range(count):
            began_s = time.perf_counter()
            call(value)
            seconds.append(time.perf_counter() - began_s)
        found[name] = float(np.median(seconds))
    return found


def serve_grpc(tell: Any) -> None:
    """A server as Launchpad's Courier is one: gRPC, arguments and results pickled."""
    import grpc  # type: ignore[import-untyped]

    def answer(request: bytes, _: Any) -> bytes:
        method, given = pickle.loads(request)  # noqa: S301  (what is compared with)
        return pickle.dumps(getattr(echo, method)(*given))

    echo = Echo()
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(16), options=limits)
    handler = grpc.unary_unary_rpc_method_handler(answer)
    handlers = grpc.method_handlers_generic_handler("courier", {"Call": handler})
    server.add_generic_rpc_handlers((handlers,))
    tell.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def serve_pipe(pipe: Any) -> None:
    """The least that Python has: `multiprocessing.connection`, pickled."""
    echo = Echo()
    while True:
        method, given = pipe.recv()
        pipe.send(getattr(echo, method)(*given))
