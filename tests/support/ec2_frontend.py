"""A real moto server, behind a front that does what moto leaves out and EC2 does.

The front checks every signature, remembers client tokens, sells out, refuses beyond a quota or
without a right, throttles, loses answers, and lists new instances late.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qsl, urlencode
from urllib.request import ProxyHandler, build_opener
from urllib.request import Request as HttpRequest

from tests.support.cloud_servers import SECRET, AwsAnswers, Reply, Request, ec2_error, sigv4_scope

NO_INSTANCES = (
    '<DescribeInstancesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
    "<requestId>59dbff89</requestId><reservationSet/></DescribeInstancesResponse>"
)


@dataclass
class Ec2Frontend:
    """See the module.

    Attributes:
        moto: address of the moto server.
        prices: answers about prices, which moto has none of.
        left: instances that are left, by type; others have no bound.
        over_quota: types of which the account may run no more.
        troubles: replies that come first, whatever is asked.
        denied: actions that the caller has no right to.
        lose: how many answers to launches get lost.
        late_s: how long the next answer to a launch takes.
        stale: how many lists still lack what was launched.
    """

    moto: str
    prices: AwsAnswers = field(default_factory=AwsAnswers)
    left: dict[str, int] = field(default_factory=dict)
    over_quota: set[str] = field(default_factory=set)
    troubles: deque[Reply] = field(default_factory=deque)
    denied: set[str] = field(default_factory=set)
    lose: int = 0
    late_s: float = 0.0
    stale: int = 0
    launches: list[dict[str, str]] = field(default_factory=list)
    _tokens: dict[str, tuple[str, Reply]] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Forget what earlier tests made: moto keeps it for the whole process."""
        sent = HttpRequest(f"{self.moto}/moto-api/reset", method="POST")
        build_opener(ProxyHandler({})).open(sent, timeout=60).close()

    def __call__(self, request: Request) -> Reply:
        with self._lock:
            return self._answer(request)

    def _answer(self, request: Request) -> Reply:
        if sigv4_scope(request, SECRET) is None:
            return ec2_error("AuthFailure", "AWS was not able to validate the credentials", 401)
        target = request.headers.get("x-amz-target", "")
        if target.startswith("AWSPriceListService"):
            return self.prices(request)
        if target:
            return self._forward(request, request.body)
        if self.troubles:
            return self.troubles.popleft()
        asked = dict(parse_qsl(request.body.decode(), keep_blank_values=True))
        action = asked["Action"]
        if action in self.denied or "*" in self.denied:
            text = (
                "You are not authorized to perform this operation. User: arn:aws:iam::1:user/u is "
                f"not authorized to perform: ec2:{action} on resource: arn:aws:ec2:::instance/*"
            )
            return ec2_error("UnauthorizedOperation", text, 403)
        if action == "DescribeSpotPriceHistory":
            return self.prices(request)
        if action == "RunInstances":
            return self._run(request, asked)
        if action == "DescribeInstances" and self.stale > 0:
            self.stale -= 1
            return Reply(200, "text/xml;charset=UTF-8", NO_INSTANCES)
        return self._forward(request, request.body)

    def _run(self, request: Request, asked: dict[str, str]) -> Reply:
        token, digest = asked["ClientToken"], hashlib.sha256(request.body).hexdigest()
        assert 0 < len(token) <= 64 and token.isascii()
        if token in self._tokens:
            known, reply = self._tokens[token]
            if known != digest:
                return ec2_error("IdempotentParameterMismatch", "other parameters")
            return reply
        type_, count = asked["InstanceType"], int(asked["MaxCount"])
        if type_ in self.over_quota:
            return ec2_error("VcpuLimitExceeded", "You have requested more vCPU capacity")
        granted = min(count, self.left.get(type_, count))
        if granted < int(asked["MinCount"]):
            return ec2_error("InsufficientInstanceCapacity", "We do not have sufficient", 500)
        if type_ in self.left:
            self.left[type_] -= granted
        asked["MinCount"] = asked["MaxCount"] = str(granted)  # moto makes the least count
        self.launches.append(asked)
        reply = self._forward(request, urlencode(asked).encode())
        assert reply.status == 200, reply.body
        self._tokens[token] = (digest, reply)
        self.stale = 1
        late_s, self.late_s = self.late_s, 0.0
        time.sleep(late_s)
        if self.lose > 0:
            self.lose -= 1
            return Reply(0, "", "")
        return reply

    def _forward(self, request: Request, body: bytes) -> Reply:
        kept = {k: v for k, v in request.headers.items() if k not in ("host", "content-length")}
        sent = HttpRequest(self.moto + request.path, data=body, headers=kept, method="POST")
        try:
            with build_opener(ProxyHandler({})).open(sent, timeout=60) as reply:
                return Reply(reply.status, reply.headers["Content-Type"], reply.read().decode())
        except HTTPError as error:
            return Reply(error.code, error.headers["Content-Type"], error.read().decode())
