"""Where the tests run, and how near is near.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is first imported. A test that
takes `device` runs there, and again on the GPU under `-m gpu`.
"""

import os
from collections.abc import Callable

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Relative norm of the error, ‖actual − expected‖ / ‖expected‖, expected in float64. Storing a result costs half a unit
# in the last place: 2⁻⁹ in bfloat16, 2⁻¹² in float16. The interpreter cuts bfloat16 off instead of rounding it (up to
# 2⁻⁸), and a result that passes through two roundings has both: 2 · 2⁻⁸ and 4 · 2⁻¹², rounded up.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of others about themselves: two of torch, seen on a GPU only, and one of Triton 3.6's interpreter."""
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS, but there was no current CUDA context")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated")  # inductor's import
    scalar = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning:triton.runtime.interpreter"
    config.addinivalue_line("filterwarnings", scalar)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected where there is none."""
    if HAS_GPU:
        return
    without = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in without])
    items[:] = without


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU (Triton's interpreter), and the GPU under `-m gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture
def near() -> Callable[..., None]:
    """near(actual, expected float64, slack=1): within slack times the tolerance of actual's dtype."""

    def check(actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> None:
        assert actual.shape == expected.shape
        difference = (actual.detach().double().cpu() - expected.detach().double().cpu()).norm()
        error = float(difference / expected.detach().double().norm().cpu().clamp(min=1e-30))
        assert error <= slack * TOLERANCE[actual.dtype], f"relative error {error:.3g} in {actual.dtype}"

    return check
