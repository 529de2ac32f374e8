"""Sends requests to a running relay over its control socket."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Final

from geo_ray.errors import ConfigError, LabDownError

_ANSWER_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 10.0
_number = itertools.count()


class RelayClient:
    """A client of one relay; several threads may use it.

    Args:
        control_path: its control socket.
    """

    def __init__(self, control_path: Path) -> None:
        self._path = control_path

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            do: name of the request; see `geo_ray.lab.relay.control.Control`.
            values: JSON values.

        Raises:
            LabDownError: the relay does not answer.
            ConfigError: the relay refuses the request; the message says why.
        """
        own = self._path.with_name(
            f"client-{os.getpid()}-{threading.get_ident()}-{next(_number)}.sock"
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.settimeout(_TIMEOUT_S)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ANSWER_BYTES)
            try:
                asking.bind(str(own))
                asking.sendto(json.dumps({"do": do, **values}).encode(), str(self._path))
                answer: dict[str, Any] = json.loads(asking.recv(_ANSWER_BYTES))
            except OSError as error:
                raise LabDownError(f"the lab's relay does not answer: {error}") from error
            finally:
                own.unlink(missing_ok=True)
        if "error" in answer:
            raise ConfigError(
                f"the lab's relay refuses '{do}': {answer['error']}",
                fix="Correct what is named; `geo-ray lab status` lists regions and links.",
            )
        return answer
