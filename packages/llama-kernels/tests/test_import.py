"""`import llama_kernels` asks nothing of the machine: no triton, no GPU, no driver."""

import subprocess
import sys

# triton is made invisible where the import system looks for files: just as on a system without the wheel, both
# `import triton` and `importlib.util.find_spec("triton")` find nothing.
WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] == "triton" else PathFinder.find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""

IMPORT_EVERY_MODULE = """
import importlib, pkgutil
import llama_kernels
names = [info.name for info in pkgutil.walk_packages(llama_kernels.__path__, "llama_kernels.")]
for name in names:
    importlib.import_module(name)
"""

USES_CPU = """
import torch
assert not torch.cuda.is_initialized(), "the import looked for a GPU"
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_module_imports_without_triton() -> None:
    run(
        WITHOUT_TRITON
        + IMPORT_EVERY_MODULE
        + USES_CPU
        + "import importlib.util\n"
        + "assert importlib.util.find_spec('triton') is None and 'triton' not in sys.modules\n"
    )


def test_import_looks_for_no_gpu() -> None:
    run(IMPORT_EVERY_MODULE + USES_CPU)
