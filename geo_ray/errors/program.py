"""Errors of jobs written as programs (exit code 16)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class ProgramError(GeoRayError):
    """A job written as a program cannot run."""

    code = "PROGRAM"
    exit_code = 16
    chapter = "Programs"
    causes = "See the codes of this chapter."
    advice = "Correct what is named; docs/program.md describes programs and their nodes."


class ProgramInvalidError(ProgramError):
    """A program contradicts itself."""

    code = "PROGRAM_INVALID"
    causes = (
        "Two nodes of one name, a handle of a node that is not there, replicas below one, handles "
        "that lead in a circle."
    )
    advice = "Correct the group or the node that is named."


class ProgramRegionError(ProgramError):
    """A program names a region that is not there."""

    code = "PROGRAM_REGION"
    causes = (
        "A misspelt region in a group, a link or a place; a cluster without nodes of that label."
    )
    advice = "Correct the region, or give nodes of the cluster its label."


class ProgramLoadError(ProgramError):
    """A file has no program that could be taken from it."""

    code = "PROGRAM_LOAD"
    causes = "A misspelt name, a file without a program, or one with several."
    advice = "Name the program: FILE.py:name, a `Program` or a function that returns one."


class ProgramStalledError(ProgramError):
    """On the virtual clock nothing can happen any more, and the program has not ended."""

    code = "PROGRAM_STALLED"
    causes = "A node that waits for what nobody will do."
    advice = "Look at what the named nodes wait for."


class NodeFailedError(ProgramError):
    """A node of a program raised, or its process ended, more often than its group allows."""

    code = "NODE_FAILED"
    causes = "An exception in the node's own code; its process was killed or ran out of memory."
    advice = "Read the node's own traceback in the message; allow restarts with `restarts`."


class NodeCallError(ProgramError):
    """A method of a node raised while it answered a call; the node goes on."""

    code = "NODE_CALL"
    causes = "An exception in the method, a method that is not there, arguments that do not fit."
    advice = "Read the node's own traceback in the message."


class NodeLostError(ProgramError):
    """A node's process ended while a call was under way, so nobody knows what came of the call."""

    code = "NODE_LOST"
    causes = "The process was killed or ran out of memory, or its machine is gone."
    advice = "Call again if the call may be carried out twice: a node that is restarted answers."


class NodeEndedError(ProgramError):
    """A call to a node of a program that has ended."""

    code = "NODE_ENDED"
    causes = "A caller that was kept for longer than its program runs."
    advice = "Call nodes while the program runs, and return from `run` what is needed later."


class NodeUnshippableError(ProgramError):
    """A node's function or its arguments cannot be sent to another process."""

    code = "NODE_UNSHIPPABLE"
    causes = (
        "A lambda, a class defined inside a function, an argument that holds a lock or a socket."
    )
    advice = "Define the node at the top of a module and give it plain values, or run in threads."


class ValueUnshippableError(ProgramError):
    """A value cannot be sent from node to node."""

    code = "VALUE_UNSHIPPABLE"
    causes = "An object of a class of one's own, a set, an open file, an array of objects."
    advice = (
        "Send None, numbers, texts, bytes, lists, tuples, dictionaries, NumPy arrays and tensors."
    )
