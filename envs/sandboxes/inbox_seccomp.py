"""In the box: system calls that no command needs and that reach beyond the box are refused, whatever the backend does.

A filter that the supervisor puts on itself and that every process of the box inherits (seccomp, "filter" mode). It is
beside the engine's own profile, which a namespace box does not have and which on older engines lets vsock sockets
through: no network namespace holds those back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags of clone
FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink

# name: (x86_64, aarch64)
REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "syslog": (103, 116),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # x86_64 numbers from here on are the same calls again, in another convention

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def filter_program(machine: str) -> bytes | None:
    """The filter for a machine; None for one whose call numbers are not in the table."""
    if machine not in ARCHES:
        return None
    column = list(ARCHES).index(machine)
    program: list[Instruction] = [(LOAD, 0, 0, AT_ARCH), (JUMP_EQUAL, 1, 0, ARCHES[machine]), _refuse(errno.EPERM)]
    program.append((LOAD, 0, 0, AT_NUMBER))
    if machine == "x86_64":
        program += [(JUMP_GREATER_EQUAL, 0, 1, X32), _refuse(errno.ENOSYS)]
    for numbers in REFUSED.values():
        program += [(JUMP_EQUAL, 0, 1, numbers[column]), _refuse(errno.EPERM)]
    program += [
        (JUMP_EQUAL, 0, 1, CLONE3[column]),
        _refuse(errno.ENOSYS),
    ]  # its flags are out of sight; libc falls back
    program += [(JUMP_EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, AT_FIRST_ARGUMENT)]
    program += [(JUMP_SET, 0, 4 + len(FAMILIES), NEW_NAMESPACE), _refuse(errno.EPERM)]
    program += [(JUMP_EQUAL, 0, 2 + len(FAMILIES), SOCKET[column]), (LOAD, 0, 0, AT_FIRST_ARGUMENT)]
    program += [(JUMP_EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    program += [_refuse(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def confine() -> None:
    """Put the filter on this process and all that it will start; nothing where there is none for this machine."""
    program = filter_program(os.uname().machine)
    if program is None:
        return
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot set the system call filter")


def _refuse(number: int) -> Instruction:
    return RETURN, 0, 0, ERRNO | number
