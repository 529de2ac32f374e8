"""What a notice says, and what reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class NoticeKind(StrEnum):
    """How sure it is that the machine goes."""

    TAKEN_BACK = "taken_back"  # at the deadline
    RISK = "risk"  # more likely than before; the machine may as well stay


@dataclass(frozen=True, slots=True)
class MachineNotice:
    """A cloud says that a machine will be, or may be, taken away.

    Attributes:
        machine: the cloud's name of it.
        deadline_unix_s: when it is gone; None: not said.
        kind: whether it surely goes.
    """

    machine: str
    deadline_unix_s: float | None
    kind: NoticeKind


class NoticeReader(Protocol):
    """Asks the metadata service of the machine that it runs on."""

    def machine_id(self) -> str:
        """Return the cloud's name of this machine.

        Raises:
            ProviderUnreachableError: nothing answers; this is no machine of that cloud.
        """

    def read(self) -> MachineNotice | None:
        """Return the present notice; a machine that is taken back hides a mere risk.

        Raises:
            ProviderUnreachableError: nothing answers, or nothing that makes sense.
        """
