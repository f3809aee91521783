"""llama.cpp in peers.py: its server, weights as bf16 or Q4_0. A process for each arm and depth.

The source tree lies in the environment's folder `llama.cpp`, built in its `build`. Its converter knows published tokenizers by a hash;
it is told that an own one splits as GPT-2's does, which matters to text, not to the ids used here. Told to ignore end tokens, the
server never draws them, where others draw and pass over them: a text may differ behind such a place.
"""

from __future__ import annotations

import atexit
import json
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from worker import Accepted, Generate, Job, Told, main

TREE = Path(sys.prefix) / "llama.cpp"


def convert(source: Path, out: Path, bits: int) -> None:
    sys.path[:0] = [str(TREE), str(TREE / "gguf-py")]
    from conversion import TextModel, get_model_class

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel.no_mtp = True         # a checkpoint without a head is refused otherwise
    architecture, = json.loads((source / "config.json").read_text("utf-8"))["architectures"]
    get_model_class(architecture).set_vocab = TextModel._set_vocab_gpt2         # Gemma's asks for a tokenizer of its own
    whole = out / ("model.gguf" if bits == 16 else "whole.gguf")
    sys.argv = ["convert_hf_to_gguf.py", str(source), "--outtype", "bf16", "--outfile", str(whole)]
    runpy.run_path(str(TREE / "convert_hf_to_gguf.py"), run_name="__main__")
    if bits == 4:
        subprocess.run([TREE / "build/bin/llama-quantize", whole, out / "model.gguf", "Q4_0"], check=True)
        whole.unlink()


def load(job: Job) -> Generate:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guesses = ["-md", f"{job['draft']}/model.gguf", "--spec-type", "draft-simple", "--spec-draft-n-max", str(job["depth"])]
    room = 2048 * job["users"] if job["users"] > 1 else 0       # 0: as long a text as the model takes
    server = subprocess.Popen([TREE / "build/bin/llama-server", "-m", f"{job['target']}/model.gguf", "-t", str(job["threads"]),
                               "-c", str(room), "-np", str(job["users"]),
                               "--host", "127.0.0.1", "--port", str(port), *(guesses if job["depth"] else ())])
    atexit.register(server.kill)

    def post(path: str, body: Job | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}))

    while True:
        try:
            post("/health").close()
            break
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, f"llama-server ended with {server.returncode}"
            time.sleep(0.2)

    def generate(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        def one(text: int) -> tuple[list[int], int | None]:
            body = {"prompt": request["prompts"][text], "n_predict": request["max_tokens"], "temperature": request["temperature"],
                    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": request["seeds"][text], "ignore_eos": True, "cache_prompt": False,
                    "return_tokens": True, "stream": True}
            ids: list[int] = []
            told.begun(text)
            with post("/completion", body) as lines:
                for line in lines:                                   # data: {"tokens": [of this step], …}, and empty ones
                    if line.startswith(b"data: "):
                        said = json.loads(line.removeprefix(b"data: "))
                        ids += said["tokens"]
                        told(text, len(said["tokens"]))
            return ids, said["timings"].get("draft_n_accepted")

        with ThreadPoolExecutor(request["users"]) as users:
            texts, stood = zip(*users.map(one, range(len(request["prompts"]))), strict=True)
        return list(texts), None if None in stood else sum(stood)

    return generate


if __name__ == "__main__":
    main(load, (), convert)
