"""Seeing a model work on one prompt: what `llama-infer inspect` measures and shows."""

from .look import Look as Look
from .look import look as look
from .recorder import Operation as Operation
from .recorder import Recorder as Recorder
from .report import report as report
