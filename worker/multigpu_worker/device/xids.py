"""XIDs, the error numbers of NVIDIA's driver, and the reaction that each requires.

Source: NVIDIA's Xid catalog, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, column "Resolution
Bucket (Immediate Action)", as of driver R580 for A100 to GB200. docs/health.md lists the consequences of each class.
"""

from enum import Enum
from typing import NamedTuple


class XidClass(Enum):
    # RESTART_APP: a task did something illegal. The task is charged, the device is fit.
    APPLICATION = "the application's fault"
    # Follows another error or the end of a process. No reaction.
    SEQUEL = "a consequence of something else"
    # A repaired error, or one that may become worse. The device stays in use.
    NOTICE = "noted"
    # RESTART_APP for a hardware error: the running tasks have lost data, the device is fit otherwise.
    CONTAINED = "a contained error of the memory"
    # RESET_GPU: unusable until the device is reset.
    RESET = "needs a reset of the GPU"
    # RESTART_BM, RESTART_VM: unusable until the host is restarted.
    REBOOT = "needs a restart of the host"
    # CHECK_MECHANICALS, CONTACT_SUPPORT: unusable until a person has examined the hardware.
    PERSON = "needs a person"


class Xid(NamedTuple):
    meaning: str
    reaction: XidClass


A, S, N, C, R, B, P = XidClass

XIDS: dict[int, Xid] = {
    8: Xid("GPU stopped processing", A),
    11: Xid("invalid or corrupted push buffer stream", A),
    13: Xid("graphics engine exception", A),
    25: Xid("invalid or illegal push buffer stream", A),
    31: Xid("GPU memory page fault", A),
    32: Xid("invalid or corrupted push buffer stream", A),
    43: Xid("GPU stopped processing", S),
    45: Xid("preemptive cleanup, due to previous errors", S),
    46: Xid("GPU stopped processing", R),
    48: Xid("double bit ECC error", R),
    54: Xid("auxiliary power is not connected", P),
    62: Xid("internal micro-controller halt", R),
    63: Xid("GPU memory remapping event", N),
    64: Xid("GPU memory remapping failure", R),
    68: Xid("video processor exception", A),
    69: Xid("graphics engine class error", A),
    74: Xid("NVLink error", R),
    79: Xid("GPU has fallen off the bus", B),
    92: Xid("high single-bit ECC error rate", N),
    94: Xid("contained memory error", C),
    95: Xid("uncontained memory error", R),
    109: Xid("context switch timeout", R),
    110: Xid("security fault", R),
    119: Xid("GSP RPC timeout", R),
    120: Xid("GSP error", R),
    136: Xid("link training failed", R),
    137: Xid("NVLink privilege error", A),
    140: Xid("unrecovered ECC error", R),
    142: Xid("NVENC3 error", P),
    143: Xid("GPU initialization error", R),
    151: Xid("key rotation error", B),
    154: Xid("GPU recovery action changed", S),  # events.py reads the new action
    155: Xid("NVLink software defined error", R),
    156: Xid("resource retirement event", R),
    157: Xid("resource retirement failure", N),
    158: Xid("GPU fatal timeout", R),
    171: Xid("uncorrectable DRAM error", S),  # gives details of an XID 48
    172: Xid("uncorrectable SRAM error", S),
}
# Blackwell's NVLinks. Only the kernel's log has the details; NVML's recovery action says what to do.
XIDS.update({code: Xid("NVLink error", N) for code in range(144, 151)})

REMEDIES = {
    XidClass.RESET: "stop this host's workers and run nvidia-smi --gpu-reset, or restart the host",
    XidClass.REBOOT: "restart the host; if it happens again, have the hardware examined",
    XidClass.PERSON: "examine the host's hardware, or contact NVIDIA's support",
    XidClass.NOTICE: "watch it",
    XidClass.CONTAINED: "if it happens often, reset the GPU",
}


def xid_of(code: int) -> Xid:
    """The entry of an XID. XIDs that the catalog does not have, or lists as unused, are notices."""
    return XIDS.get(code, Xid("an XID that this version does not know", XidClass.NOTICE))
