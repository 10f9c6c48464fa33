"""System calls that a candidate may not make, as a seccomp filter (BPF).

No library is needed: a filter is a list of 8-byte instructions. ``bwrap --seccomp`` loads it just before it starts the
interpreter. A call that only an attack on the sandbox makes ends the process (SIGSYS). A call that a library may try
and do without fails with an error, as do calls that make memory invisible from outside (``memory.py``). Newer calls
than this list fail as if the kernel did not have them.

Numbers are those of Linux's ``unistd.h``; the format is in seccomp(2).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

KILL = 0x80000000
ERRNO = 0x00050000
ALLOW = 0x7FFF0000
EPERM, ENOSYS = 1, 38

LOAD, MASK, EQUAL, ABOVE, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
"""Load a word, mask it, jump where it is equal, above, at least, has one of some bits; return the verdict."""

NUMBER, ARCH, FIRST, SECOND, FOURTH = 0, 4, 16, 24, 40
"""Offsets in the kernel's ``seccomp_data``; of an argument, its lower half."""

NEW_NAMESPACE = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
AF_UNIX = 1
SHARED_ANONYMOUS = 0x21
"""MAP_SHARED and MAP_ANONYMOUS: such memory stays even when no process has it in its page tables."""

TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Calls that type into somebody else's terminal."""

X32 = 0x40000000
"""Numbers from here on belong to x86's third ABI, which would bypass the list."""


@dataclass(frozen=True, slots=True)
class SyscallNumbers:
    """A processor's numbers of the system calls.

    Attributes:
        arch: its AUDIT_ARCH.
        last: the newest call that this list knows.
        kills: calls that end the process.
        fails: calls that fail.
        clone, clone3, socketpair, ioctl, mmap: calls that are judged by their arguments.
    """

    arch: int
    last: int
    kills: dict[str, int]
    fails: dict[str, int]
    clone: int
    clone3: int
    socketpair: int
    ioctl: int
    mmap: int


_NEW_KILLS = {"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433}
_NEW_KILLS |= {"pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443}
_NEW_FAILS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "process_madvise": 440}
_NEW_FAILS |= {"memfd_secret": 447, "set_mempolicy_home_node": 450}
_NEW_FAILS |= {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}
"""Since 2019 the numbers are the same everywhere."""

X86_64 = SyscallNumbers(
    arch=0xC000003E,
    last=450,
    kills={
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "chroot": 161,
        "setns": 308,
        "unshare": 272,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "kexec_load": 246,
        "kexec_file_load": 320,
        "init_module": 175,
        "finit_module": 313,
        "delete_module": 176,
        "reboot": 169,
        "swapon": 167,
        "swapoff": 168,
        "acct": 163,
        "quotactl": 179,
        "settimeofday": 164,
        "clock_settime": 227,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "open_by_handle_at": 304,
        "keyctl": 250,
        "add_key": 248,
        "request_key": 249,
        "fanotify_init": 300,
        "lookup_dcookie": 212,
    }
    | _NEW_KILLS,
    fails={
        "socket": 41,
        "personality": 135,
        "memfd_create": 319,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "setsockopt": 54,
        "vmsplice": 278,
        "inotify_init": 253,
        "inotify_init1": 294,
        "shmget": 29,
        "shmat": 30,
        "shmctl": 31,
        "shmdt": 67,
        "msgget": 68,
        "msgsnd": 69,
        "msgrcv": 70,
        "msgctl": 71,
        "semget": 64,
        "semop": 65,
        "semctl": 66,
        "semtimedop": 220,
        "mq_open": 240,
        "name_to_handle_at": 303,
        "syslog": 103,
        "adjtimex": 159,
        "clock_adjtime": 305,
        "modify_ldt": 154,
        "vhangup": 153,
        "migrate_pages": 256,
        "move_pages": 279,
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
    }
    | _NEW_FAILS,
    clone=56,
    clone3=435,
    socketpair=53,
    ioctl=16,
    mmap=9,
)

AARCH64 = SyscallNumbers(
    arch=0xC00000B7,
    last=450,
    kills={
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "mount": 40,
        "umount2": 39,
        "pivot_root": 41,
        "chroot": 51,
        "setns": 268,
        "unshare": 97,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "kexec_load": 104,
        "kexec_file_load": 294,
        "init_module": 105,
        "finit_module": 273,
        "delete_module": 106,
        "reboot": 142,
        "swapon": 224,
        "swapoff": 225,
        "acct": 89,
        "quotactl": 60,
        "settimeofday": 170,
        "clock_settime": 112,
        "sethostname": 161,
        "setdomainname": 162,
        "open_by_handle_at": 265,
        "keyctl": 219,
        "add_key": 217,
        "request_key": 218,
        "fanotify_init": 262,
        "lookup_dcookie": 18,
    }
    | _NEW_KILLS,
    fails={
        "socket": 198,
        "personality": 92,
        "memfd_create": 279,
        "setxattr": 5,
        "lsetxattr": 6,
        "fsetxattr": 7,
        "setsockopt": 208,
        "vmsplice": 75,
        "inotify_init1": 26,
        "shmget": 194,
        "shmat": 196,
        "shmctl": 195,
        "shmdt": 197,
        "msgget": 186,
        "msgsnd": 189,
        "msgrcv": 188,
        "msgctl": 187,
        "semget": 190,
        "semop": 193,
        "semctl": 191,
        "semtimedop": 192,
        "mq_open": 180,
        "name_to_handle_at": 264,
        "syslog": 116,
        "adjtimex": 171,
        "clock_adjtime": 266,
        "vhangup": 58,
        "migrate_pages": 238,
        "move_pages": 239,
        "mbind": 235,
        "set_mempolicy": 237,
        "get_mempolicy": 236,
    }
    | _NEW_FAILS,
    clone=220,
    clone3=435,
    socketpair=199,
    ioctl=29,
    mmap=222,
)

MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
"""By ``platform.machine()``."""

Instruction = tuple[int, int, int, int]
"""Code, jump where a test holds, jump where it does not, and a number."""


def filter_program(machine: SyscallNumbers) -> list[Instruction]:
    """The filter for a processor."""
    program = [_load(ARCH), (EQUAL, 1, 0, machine.arch), _return(KILL), _load(NUMBER)]
    if machine is X86_64:
        program += _where(AT_LEAST, X32, KILL)
    program += _where(ABOVE, machine.last, ERRNO | ENOSYS)
    for number in sorted(machine.kills.values()):
        program += _where(EQUAL, number, KILL)
    for number in sorted(machine.fails.values()):
        program += _where(EQUAL, number, ERRNO | EPERM)
    # The C library falls back to clone, whose flags a filter can see; those of clone3 are behind a pointer.
    program += _where(EQUAL, machine.clone3, ERRNO | ENOSYS)
    program += _argument(machine.clone, FIRST, _where(HAS_BITS, NEW_NAMESPACE, KILL))
    program += _argument(machine.socketpair, FIRST, _unless(AF_UNIX, ERRNO | EPERM))
    program += _argument(
        machine.ioctl, SECOND, [*_where(EQUAL, TIOCSTI, ERRNO | EPERM), *_where(EQUAL, TIOCLINUX, ERRNO | EPERM)]
    )
    shared = [(MASK, 0, 0, SHARED_ANONYMOUS), *_where(EQUAL, SHARED_ANONYMOUS, ERRNO | EPERM)]
    program += _argument(machine.mmap, FOURTH, shared)
    return [*program, _return(ALLOW)]


def filter_bytes(machine: SyscallNumbers) -> bytes:
    """The filter as ``struct sock_filter[]``."""
    return b"".join(struct.pack("=HBBI", *each) for each in filter_program(machine))


def decide(program: list[Instruction], *, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The filter's verdict on one call: the kernel's interpreter in one page, for tests."""
    data = {NUMBER: number, ARCH: arch}
    for k, argument in enumerate(arguments):
        data[FIRST + 8 * k] = argument & 0xFFFFFFFF
    word, at = 0, 0
    while True:
        code, then, other, k = program[at]
        at += 1
        match code:
            case 0x20:
                word = data.get(k, 0)
            case 0x54:
                word &= k
            case 0x06:
                return k
            case _:
                holds = {EQUAL: word == k, ABOVE: word > k, AT_LEAST: word >= k, HAS_BITS: bool(word & k)}[code]
                at += then if holds else other


def _load(offset: int) -> Instruction:
    return LOAD, 0, 0, offset


def _return(verdict: int) -> Instruction:
    return RETURN, 0, 0, verdict


def _where(test: int, value: int, verdict: int) -> list[Instruction]:
    return [(test, 0, 1, value), _return(verdict)]


def _unless(value: int, verdict: int) -> list[Instruction]:
    return [(EQUAL, 1, 0, value), _return(verdict)]


def _argument(number: int, offset: int, tests: list[Instruction]) -> list[Instruction]:
    body = [_load(offset), *tests, _return(ALLOW)]
    return [(EQUAL, 0, len(body), number), *body]
