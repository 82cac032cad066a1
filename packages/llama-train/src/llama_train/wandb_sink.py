"""A run's figures for Weights & Biases. Its key is wandb's business (`wandb login`): it is neither read nor stored."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path

from .config import TrainConfig
from .metrics import EvaluationMetrics, StepMetrics


class WandbSink:
    """One W&B run for a run folder, however often it is resumed. With WANDB_MODE=offline, `wandb sync` it later.

    Args:
        config: of the run; its settings go along.
        folder: of the run; wandb's own files lie in its folder wandb.

    Raises:
        ValueError: the package is not installed, or wandb refuses, as without a key.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("logging.wandb needs a package: pip install 'llama-train[wandb]'") from None
        try:
            self._run = wandb.init(
                project=config.logging.wandb,
                name=config.name,
                id=_run_id(folder / "wandb"),
                resume="allow",
                dir=str(folder),
                config=asdict(config),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            )
        except (wandb.Error, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"logging.wandb is {config.logging.wandb!r}, and W&B says: {reason} "
                "(`wandb login` stores your key; WANDB_MODE=offline needs none)"
            ) from None
        # Steps of our own: wandb's must rise, and a run that goes back some steps would lose them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: StepMetrics) -> None:
        """train/loss, train/tokens_per_second, …"""
        self._log("train", asdict(metrics))

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """held_out/loss, held_out/perplexity, …"""
        self._log("held_out", asdict(metrics))

    def write_sample(self, step: int, text: str) -> None:
        """As text."""
        import wandb

        self._run.log({"step": step, "sample": wandb.Html(f"<pre>{_escaped(text)}</pre>")})

    def close(self) -> None:
        """Wait until all is written, or sent."""
        self._run.finish()

    def _log(self, section: str, figures: dict[str, float | None]) -> None:
        known = {f"{section}/{name}": value for name, value in figures.items() if name != "step" and value is not None}
        self._run.log({"step": figures["step"], **known})


def _run_id(folder: Path) -> str:
    """The same for every start of a run; not secret."""
    path = folder / "run-id"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
