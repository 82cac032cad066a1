"""`llama-train bench sweep`: which layout and batch size is fastest on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .config_checks import finite_and, require

_EXAMPLES = """
A case is the training step of `llama-train run` on random tokens, in processes of its own: one that runs out of memory
is a line in the table, and the next one starts. What cannot work is passed over, with the reason. The same command goes
on after a stop: cases that were measured with the same settings are not measured again.

Examples:
  llama-train bench sweep smollm-1.7b --seq 2048 --micro-batch 1 2 4 8 --activation-checkpointing none full
  llama-train bench sweep RUN.toml --layouts 1 dp2 tp2 dp2.tp2 --accumulation 1 4 --compile no yes
  llama-train bench sweep tiny --device cpu --seq 64 --micro-batch 1 2 --steps 3
"""


@dataclass(frozen=True)
class SweepConfig:
    """Speed, MFU and memory of layouts, batch sizes and ways to save memory, each measured on this machine."""

    base: Annotated[str, tyro.conf.Positional]
    """A run's TOML file whose other settings all cases have, or a preset of llama_core."""
    layouts: tuple[str, ...] = ()
    """Sizes such as 1, dp2, tp4, dp2.tp2.pp2 (also cp, dp_replicate); unset means one process, and all GPUs as dp."""
    micro_batch: tuple[int, ...] = (1, 2, 4)
    """Rows at once."""
    accumulation: tuple[int, ...] = (1,)
    """Micro-batches of a step."""
    activation_checkpointing: tuple[Literal["none", "selective", "full"], ...] = ()
    """Unset means the file's."""
    compile: tuple[Literal["no", "yes"], ...] = ()
    """Unset means the file's."""
    seq: int | None = None
    """Tokens in a row; unset means the file's, and 2048 at most for a preset."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Unset means the file's."""
    steps: int = 10
    """Timed steps."""
    warmup: int = 3
    """Steps before them."""
    timeout: float = 900.0
    """Seconds for one case."""
    retry: bool = False
    """Measure those again that failed, ran out of memory or took too long."""
    output: str = "sweep"
    """Folder of sweep.csv, sweep.json, sweep.png and what each case left."""

    def __post_init__(self) -> None:
        for name in ("steps", "warmup"):
            require(getattr(self, name) >= 1, f"--{name}", getattr(self, name), "at least 1")
        for name in ("micro_batch", "accumulation"):
            numbers = getattr(self, name)
            fine = bool(numbers) and min(numbers) >= 1
            require(fine, f"--{name.replace('_', '-')}", numbers, "numbers of at least 1")
        require(self.seq is None or self.seq >= 2, "--seq", self.seq, "at least 2")
        require(finite_and(self.timeout, self.timeout > 0), "--timeout", self.timeout, "above 0")


def main(arguments: list[str]) -> int:
    """Measure, print and write; the exit status is 0 where at least one case could be measured."""
    description = (SweepConfig.__doc__ or "") + "\n" + _EXAMPLES
    asked = tyro.cli(SweepConfig, args=arguments, prog="llama-train bench sweep", description=description)

    import json
    from typing import Any

    from .config import TrainConfig
    from .config_file import load_config
    from .manage.collect import table_console, write_text
    from .manage.sweep import cases, parse_layout, probe, run_case, why_not
    from .manage.sweep_results import Results, by_speed, csv_of, png_of, table_of

    base = load_config(asked.base) if asked.base.endswith(".toml") else _preset(asked.base)
    assert isinstance(base, TrainConfig)
    if asked.seq is not None:
        base = replace(base, data=replace(base.data, sequence_length=asked.seq))
    if asked.device is not None:
        base = replace(base, device=asked.device)
    for layout in asked.layouts:
        parse_layout(layout)
    machine = probe(base.device)
    every = f"dp{machine.count}"
    layouts = asked.layouts or (("1", every) if machine.device == "cuda" and machine.count > 1 else ("1",))
    output = Path(asked.output)
    kept = Results(output / "cases", asked.steps, asked.warmup)
    rows: list[dict[str, Any]] = []
    print(f"machine    {machine.count} × {machine.name}")
    chosen = cases(
        base,
        layouts,
        asked.micro_batch,
        asked.accumulation,
        asked.activation_checkpointing or (base.activation_checkpointing,),
        [word == "yes" for word in asked.compile] or [base.compile],
    )
    for case in chosen:
        found, how = kept.known(case), "known"
        if found is None or (asked.retry and found["state"] != "ok"):
            reason = why_not(case, machine)
            how = "measured" if reason is None else "passed over"
            found = {"state": "impossible", "reason": reason}
            if reason is None:
                found = run_case(case, output / "cases", asked.steps, asked.warmup, asked.timeout)
                kept.keep(case, found)
        speed = f"{found['tokens_per_second']:,.0f} tokens/s" if found["state"] == "ok" else found["state"]
        why = f", {found['reason']}" if found.get("reason") else ""
        print(f"{how:12}{case.key}: {speed}{why}", flush=True)
        rows.append({**case.row(), **found})
        write_text(output / "sweep.csv", csv_of(by_speed(rows)))
        write_text(
            output / "sweep.json", json.dumps({"machine": vars(machine), "cases": by_speed(rows)}, indent=1) + "\n"
        )
    console = table_console()
    console.print(table_of(rows))
    names = ["sweep.csv", "sweep.json"]
    if not any(row["state"] == "ok" for row in rows):
        console.print(f"written    {', '.join(str(output / name) for name in names)}", markup=False, soft_wrap=True)
        return 1
    try:
        (output / "sweep.png").write_bytes(png_of(rows))
        names.append("sweep.png")
    except ValueError as error:
        console.print(f"no PNG     {error}", markup=False)
    console.print(f"written    {', '.join(str(output / name) for name in names)}", markup=False, soft_wrap=True)
    return 0


def _preset(name: str) -> object:
    from llama_core import preset

    from .config import DataConfig, ModelConfig, ParallelSettings, TrainConfig

    shape = preset(name)
    length = min(2048, shape.max_position_embeddings)
    return TrainConfig(
        model=ModelConfig(preset=name),
        data=DataConfig(vocab_size=max(258, shape.vocab_size), sequence_length=length),
        parallel=ParallelSettings(dp_shard=1),
    )
