"""Launches toy kernels through Triton's own CUDA driver, on a stub of the CUDA driver library that runs nothing.

    LD_LIBRARY_PATH=FOLDER TRITON_CACHE_DIR=CACHE python kernel_stub_cuda.py

FOLDER holds the stub, which `build_stub` makes with gcc. Prints JSON: `binaries`, a list of [cache key, found in the
cache], and `launches`, the number of launches that reached the library.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["build_stub", "main"]

SUCCEEDS = """
CtxSetCurrent CtxSetLimit FuncSetAttribute FuncSetCacheConfig TensorMapEncodeTiled TensorMapEncodeIm2col ModuleUnload
PointerGetAttributes CtxGetLimit DriverGetVersion OccupancyMaxActiveClusters OccupancyMaxActiveBlocksPerMultiprocessor
"""
GIVES = {"CtxGetCurrent": "void **out", "DevicePrimaryCtxRetain": "void **out", "ModuleLoadData": "void **out"}
SOURCE = """
static int launches;
int stub_launches(void) { return launches; }
int cuLaunchKernelEx(void) { return ++launches, 0; }
int cuDeviceGet(int *out) { return *out = 0; }
int cuDeviceGetAttribute(int *out) { return *out = 232448, 0; }
int cuFuncGetAttribute(int *out, int which) { return *out = which ? 0 : 1024, 0; }
int cuModuleGetFunction(void **out) { return *out = &launches, 0; }
int cuGetErrorString(int error, const char **out) { return *out = "the stub", 0; }
int cuPointerGetAttribute(void **out, int which, unsigned long long pointer) { return *out = (void *)pointer, 0; }
"""


def build_stub(folder: Path) -> None:
    """Compiles `libcuda.so.1` into a folder.

    Raises:
        subprocess.CalledProcessError: gcc failed.
    """
    source = SOURCE
    source += "".join(f"int cu{name}(void) {{ return 0; }}\n" for name in SUCCEEDS.split())
    source += "".join(f"int cu{name}({out}) {{ return *out = &launches, 0; }}\n" for name, out in GIVES.items())
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)


def main() -> None:
    """Launches as an ordinary process on a GPU does, with CPU tensors."""
    import torch
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    from kernel_toys import scale_kernel

    driver = CudaDriver()
    # These three ask PyTorch, whose CPU build knows no GPU; the rest is Triton's own code.
    driver.get_current_device = lambda: 0
    driver.get_device_capability = lambda _device: (9, 0)
    driver.get_current_stream = lambda _device: 0
    triton.runtime.driver.set_active(driver)
    binaries = []

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **_more: Any) -> None:
        binaries.append([metadata["hash"], cache_hit])

    triton.knobs.compilation.listener = listen
    for dtype, count in ((torch.bfloat16, 1000), (torch.bfloat16, 17), (torch.float32, 1)):
        x = torch.zeros(1024, dtype=dtype)
        grid = (triton.cdiv(count, 256),)
        scale_kernel.fn[grid](x, x, count, 0.25, SQUARE=True, BLOCK=256, num_warps=2, num_stages=1)
    launches = ctypes.CDLL("libcuda.so.1").stub_launches()
    sys.stdout.write(json.dumps({"binaries": binaries, "launches": launches}) + "\n")


if __name__ == "__main__":
    main()
