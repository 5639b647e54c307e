"""Which NVIDIA GPUs this machine has, asked of the driver's own tool: no library to install, nothing left loaded."""

import shutil
import subprocess

QUERY_TIMEOUT_S = 10.0


def gpu_uuids() -> list[str]:
    """The UUIDs of the GPUs, in the driver's order; empty if there is no GPU or no driver.

    Raises RuntimeError when a driver is there and does not answer: a fleet on the CPU would hide that.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi did not answer within {QUERY_TIMEOUT_S:g} s") from error
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip()
        # 6: it looked, and found no device. 9: the tool is installed, the driver is not loaded.
        if answer.returncode in (6, 9) or "No devices were found" in said:
            return []
        raise RuntimeError(f"nvidia-smi failed ({answer.returncode}): {said}")
    return [line.strip() for line in answer.stdout.splitlines() if line.strip().startswith("GPU-")]
