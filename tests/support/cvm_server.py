"""Tencent Cloud's CVM and SSM on loopback: signatures, states, stock, quotas, timers, troubles."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.cloud_servers import (
    KEY_ID,
    SECRET,
    Reply,
    Request,
    TencentAnswers,
    tc3_is_right,
    tencent_error,
    tencent_reply,
)

START_S = 0.2
END_S = 0.2
LIST_LATE_S = 0.1
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass
class CvmServer:
    """See the module.

    Attributes:
        prices: answers about prices and stock.
        left: machines that are left, by type; others have no bound.
        quota: machines that the account may still make, by zone.
        troubles: replies that come first, whatever is asked.
        denied: actions that the caller has no right to.
        lose: how many answers to launches get lost.
        late_s: how long the next answer to a launch takes.
        fail_late: code with which the next launch's first machine fails after it was accepted.
        ahead_s: how far the clock of the cloud is ahead of this machine's.
    """

    prices: TencentAnswers = field(default_factory=TencentAnswers)
    left: dict[str, int] = field(default_factory=dict)
    quota: dict[str, int] = field(default_factory=dict)
    troubles: deque[Reply] = field(default_factory=deque)
    denied: set[str] = field(default_factory=set)
    lose: int = 0
    late_s: float = 0.0
    fail_late: str = ""
    ahead_s: float = 0.0
    launches: list[dict[str, Any]] = field(default_factory=list)
    _machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    _tokens: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    _secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    _disabled: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> Reply:
        with self._lock:
            return self._answer(request)

    def _answer(self, request: Request) -> Reply:
        product = "ssm" if request.headers["x-tc-version"] == "2019-09-23" else "cvm"
        if not tc3_is_right(request, SECRET, product):
            text = f"The provided credentials could not be validated. {KEY_ID}"
            return tencent_error("AuthFailure.SignatureFailure", text)
        if self.troubles:
            return self.troubles.popleft()
        action, region = request.headers["x-tc-action"], request.headers["x-tc-region"]
        asked = json.loads(request.body)
        if action in self.denied or "*" in self.denied:
            text = f"you are not authorized to perform operation ({product}:{action})"
            return tencent_error("UnauthorizedOperation", text)
        match action:
            case "RunInstances":
                return self._run(region, asked)
            case "DescribeInstances":
                return self._describe(region, asked)
            case "TerminateInstances":
                return self._terminate(asked)
            case "DescribeZoneInstanceConfigInfos":
                return self.prices._quotas(region, asked)
        return self._secret(action, asked)

    # ------------------------------------------------------------------ machines

    @property
    def now(self) -> float:
        return time.time() + self.ahead_s

    def _run(self, region: str, asked: dict[str, Any]) -> Reply:
        token, text = asked["ClientToken"], json.dumps(asked, sort_keys=True)
        assert 0 < len(token) <= 64 and token.isascii()
        assert len(asked["UserData"]) <= 16384 and base64.b64decode(asked["UserData"])
        assert asked["Placement"]["Zone"].startswith(region)
        is_spot = asked["InstanceChargeType"] == "SPOTPAID"
        assert is_spot == ("InstanceMarketOptions" in asked)
        if token in self._tokens:
            known, ids = self._tokens[token]
            if known != text:
                return tencent_error("InvalidParameter.ClientTokenMismatch", "other parameters")
            return tencent_reply(InstanceIdSet=ids)
        type_, zone = asked["InstanceType"], asked["Placement"]["Zone"]
        count, least = asked["InstanceCount"], asked["MinCount"]
        granted = min(count, self.quota.get(zone, count))
        if granted < count:
            return tencent_error("LimitExceeded.InstanceQuota", "the quota is exceeded")
        granted = min(count, self.left.get(type_, count))
        if granted < least:
            code = "ResourcesSoldOut.SpecifiedInstanceType"
            return tencent_error(code, "The specified instance type is sold out.")
        if type_ in self.left:
            self.left[type_] -= granted
        ends = None
        if timer := asked.get("ActionTimer"):
            assert timer["TimerAction"] == "TerminateInstances"
            ends = datetime.strptime(timer["ActionTime"], TIME).replace(tzinfo=UTC).timestamp()
            assert ends - self.now >= 300, "a timer is at least five minutes ahead"
        ids = []
        for _ in range(granted):
            number = len(self._machines)
            ids.append(f"ins-{number:08x}")
            self._machines[ids[-1]] = {
                "asked": asked,
                "region": region,
                "made": self.now,
                "ends": ends,
                "address": f"10.0.{number // 250}.{number % 250 + 2}",
                "failed": self.fail_late if not ids[1:] else "",
            }
        self.fail_late = ""
        self.launches.append(asked)
        self._tokens[token] = (text, ids)
        late_s, self.late_s = self.late_s, 0.0
        time.sleep(late_s)
        if self.lose > 0:
            self.lose -= 1
            return Reply(0, "", "")
        return tencent_reply(InstanceIdSet=ids)

    def _state(self, machine: dict[str, Any]) -> str | None:
        now = self.now
        ended = machine.get("ended")
        if machine["ends"] is not None and now >= machine["ends"]:
            ended = min(ended or machine["ends"], machine["ends"])
        if ended is not None:
            return "TERMINATING" if now < ended + END_S else None
        if now < machine["made"] + START_S:
            return "PENDING"
        return "LAUNCH_FAILED" if machine["failed"] else "RUNNING"

    def _describe(self, region: str, asked: dict[str, Any]) -> Reply:
        assert asked["Limit"] <= 100
        wanted = {part["Name"]: part["Values"] for part in asked["Filters"]}
        assert len(wanted) <= 10 and all(len(values) <= 5 for values in wanted.values())
        found = []
        for id_, machine in self._machines.items():
            state = self._state(machine)
            its = machine["asked"]
            tags = its["TagSpecification"][0]["Tags"]
            facts = {f"tag:{tag['Key']}": tag["Value"] for tag in tags} | {"instance-id": id_}
            shown = state and machine["region"] == region
            late = self.now < machine["made"] + LIST_LATE_S
            if not shown or late or any(facts.get(k) not in v for k, v in wanted.items()):
                continue
            made = datetime.fromtimestamp(machine["made"], UTC).strftime(TIME)
            item = {
                "InstanceId": id_,
                "InstanceState": state,
                "InstanceType": its["InstanceType"],
                "InstanceChargeType": its["InstanceChargeType"],
                "Placement": its["Placement"],
                "CreatedTime": made,
                "PrivateIpAddresses": None if state == "PENDING" else [machine["address"]],
                "Tags": tags,
                "LatestOperationErrorMsg": machine["failed"] or None,
            }
            found.append(item)
        page = found[asked["Offset"] : asked["Offset"] + min(asked["Limit"], 2)]  # short pages
        return tencent_reply(TotalCount=len(found), InstanceSet=page)

    def _terminate(self, asked: dict[str, Any]) -> Reply:
        ids = asked["InstanceIds"]
        assert 0 < len(ids) <= 100
        known = [self._machines.get(id_) for id_ in ids]
        if any(machine is None or self._state(machine) is None for machine in known):
            return tencent_error("InvalidInstanceId.NotFound", "The instance does not exist.")
        charges = {machine["asked"]["InstanceChargeType"] for machine in known if machine}
        if len(charges) > 1:
            return tencent_error("InvalidParameter.InvalidChargeType", "one kind at a time")
        for machine in known:
            if machine is not None:
                machine.setdefault("ended", self.now)
        return tencent_reply()

    # ------------------------------------------------------------------ secrets

    def _secret(self, action: str, asked: dict[str, Any]) -> Reply:
        name = asked.get("SecretName", "")
        assert re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]{0,127}", name)
        versions = self._secrets.get(name)
        if action == "CreateSecret":
            if versions is not None:
                return tencent_error("ResourceInUse.SecretExists", "the secret exists")
            self._secrets[name] = {asked["VersionId"]: asked["SecretString"]}
            return tencent_reply(SecretName=name)
        if versions is None:
            return tencent_error("ResourceNotFound.SecretNotExist", "there is no such secret")
        match action:
            case "PutSecretValue":
                if len(versions) >= 10:
                    return tencent_error("LimitExceeded", "too many versions")
                versions[asked["VersionId"]] = asked["SecretString"]
                return tencent_reply(SecretName=name)
            case "ListSecretVersionIds":
                return tencent_reply(Versions=[{"VersionId": v} for v in versions])
            case "GetSecretValue":
                return tencent_reply(SecretString=versions[asked["VersionId"]])
            case "DeleteSecretVersion":
                del versions[asked["VersionId"]]
                return tencent_reply()
            case "DisableSecret":
                self._disabled.add(name)
                return tencent_reply()
            case "DeleteSecret":
                if name not in self._disabled or asked["RecoveryWindowInDays"] != 0:
                    return tencent_error("FailedOperation.SecretDeleteFailed", "disable it first")
                del self._secrets[name]
                return tencent_reply()
        return tencent_error("InvalidAction", "The request action is unknown.")
