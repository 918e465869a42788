"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

import portakv
from portakv import __main__, cli, compare, dispatch
from portakv.pool import HybridKVPool

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `portakv ARGS…` without the store benchmark, which has a test of its own."""
    monkeypatch.setattr(compare, "measure_store", lambda target: (2.0, 1.0))
    return lambda *args: CliRunner().invoke(cli.app, [str(arg) for arg in args])


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SCALED", {"gpt_oss": compare.SCALED["gpt_oss"]})


def one_line_error(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("portakv: ")
    return result.stderr


def test_info_accounts_for_every_row(invoke: Invoke) -> None:
    shown = json.loads(invoke("info", "--json").stdout)
    assert shown["device"] == portakv.DEVICE.value
    assert [probe["kind"] for probe in shown["probed"]] == [device.name for device in dispatch.DEVICES]
    for op in dispatch.OPS:
        names = {row.name for row in dispatch.rows(op, dispatch.CHOSEN)}
        assert {shown["kernels"][op], *shown["rejected"][op]} == names
        assert all(shown["rejected"][op].values())
        assert "executed" in shown["proof"][op]


def test_info_table_names_ops_and_reasons(invoke: Invoke) -> None:
    shown = invoke("info").stdout
    for word in (*dispatch.OPS, "comes", "first", "chosen", "not built for it", "executed"):
        assert word in shown


def test_info_explains_a_request_that_nothing_serves(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTAKV_KERNELS", "store_kv=warp")
    assert "'warp'" in one_line_error(invoke("info"))


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        (
            {"PORTAKV_DEVICE": "gpu"},
            ["info"],
            "PORTAKV_DEVICE: expected one of ['cuda', 'hip', 'xpu', 'cpu'], got 'gpu'",
        ),
        ({"PORTAKV_DEVICE": ""}, ["check", "--json"], "PORTAKV_DEVICE: expected one of"),
        (
            {"PORTAKV_KERNELS": "store_kv=native, store_kv=reference"},
            ["info"],
            "PORTAKV_KERNELS: expected each op once",
        ),
        ({"PORTAKV_KERNELS": "store_kv=warp"}, ["info"], "kernels: expected a row of store_kv among"),
        ({"PORTAKV_KERNELS": "store_kv=triton"}, ["info"], "no kernel for store_kv on cpu"),
        (
            {},
            ["run", "--new-tokens", "99999999999999999999"],
            "--new-tokens: expected at most 9223372036854775807, got",
        ),
        ({}, ["run", "--new-tokens", "2"], "--new-tokens: expected at least 3, got 2"),
        ({}, ["run", "--new-tokens", "99999999999999"], "cpu: asked for"),
        ({}, ["run", "--device", "meta"], "meta: expected a device with memory, got none"),
        ({}, ["check", "--device", "meta"], "meta: expected a device with memory, got none"),
        ({}, ["check", "--device", "xla"], "xla: expected a device with memory, got none"),
        ({}, ["check", "--device", "warp"], "device: expected a torch device, a Device or one of"),
        ({}, ["check", "--device", "cpu", "--target", "sm_90"], "expected --device or --target, got both"),
        ({}, ["compile", "--model", ".", "--page-size", "99999999999999999999"], ""),
    ],
)
def test_what_a_user_can_mend_is_one_line(environment: dict[str, str], arguments: list[str], words: str) -> None:
    """In a process of its own, whose import reads the environment."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", "portakv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"portakv: {words}")
    assert done.stderr.count("\n") == 1


def test_run_compares_the_three_models(invoke: Invoke) -> None:
    result = invoke("run", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [model["name"] for model in shown["models"]] == ["gpt_oss", "gemma3_text", "mimo_v2_flash"]
    for model in shown["models"]:
        assert model["tokens_identical"]
        assert model["max_logit_diff"] <= model["logit_tolerance"] < 1e-3
        assert model["full_layers"] > 0
        assert model["swa_layers"] > 0
        assert model["windows_passed"] > 3
        # A window's keys touch that many pages of 4 at most, and the page being filled is one more.
        window = compare.SCALED[model["name"]]["sliding_window"]
        assert 0 < model["swa_slots_held"] <= model["swa_slots_bound"] <= model["batch"] * (window + 2 * 4)
        # Whole pages of 4 for windows of 32: at most an eighth more than the model's own cache.
        assert model["bytes_held_own"] <= model["bytes_held_pool"] < 1.13 * model["bytes_held_own"]
        assert min(model["tokens_per_s_pool"], model["tokens_per_s_own"]) > 0
    assert shown["device"] == portakv.DEVICE.value
    # Of the ops that `info` lists, those that these pools have.
    assert {"translate_loc", "store_kv", "gather_kv"} <= shown["kernels"].keys()
    assert shown["kernels"].items() < json.loads(invoke("info", "--json").stdout)["kernels"].items()
    assert shown["store_gb_per_s"] == 2.0
    assert shown["copy_gb_per_s"] == 1.0


def test_scaled_models_keep_the_released_patterns() -> None:
    """Layer patterns, query heads per KV head, and K dim to V dim, as in transformers' default configs."""
    for subject in compare.scaled_subjects(torch.device("cpu"), ["x"]):
        ours = subject.model.config
        released = type(ours)()
        assert ours.layer_types == released.layer_types[: len(ours.layer_types)]
        assert set(ours.layer_types) == {"full_attention", "sliding_attention"}
        for config in (ours, released):
            config.v_head_dim = getattr(config, "v_head_dim", config.head_dim)
        ratios = [
            (config.num_attention_heads / config.num_key_value_heads, config.head_dim / config.v_head_dim)
            for config in (ours, released)
        ]
        assert ratios[0] == ratios[1]


def test_run_shows_tables_and_progress(invoke: Invoke, one_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = io.StringIO()
    monkeypatch.setattr(cli, "_err", Console(file=progress, force_terminal=True))
    result = invoke("run", "--new-tokens", 5)
    assert result.exit_code == 0, result.output
    for word in ("identical tokens", "yes", "SWA slots held, at most", "translate_loc", "store_kv", "2.0 GB/s"):
        assert word in result.stdout
    assert "10/10" in progress.getvalue()
    assert "10/10" not in result.stdout


def test_a_mismatch_exits_with_1(invoke: Invoke, one_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest key that the first sequence can see, lost at every step."""
    gather = HybridKVPool._gather

    def lossy(self: HybridKVPool, layer: Any, loc: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        gather(self, layer, loc, k_out, v_out)
        k_out[0] = 0

    monkeypatch.setattr(HybridKVPool, "_gather", lossy)
    result = invoke("run", "--json", "--new-tokens", 48)
    assert result.exit_code == 1
    (model,) = json.loads(result.stdout)["models"]
    assert model["max_logit_diff"] > 100 * model["logit_tolerance"]
    assert "mismatch" in result.stderr


def test_a_logit_that_is_nan_is_a_mismatch() -> None:
    same = dict.fromkeys(compare.Comparison.__slots__, 0) | {"tokens_identical": True}
    assert compare.Comparison(**same).matches
    assert not compare.Comparison(**(same | {"max_logit_diff": float("nan")})).matches


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny bfloat16 Gemma 3 with a byte-level tokenizer that has no padding token, as saved to disk."""
    alphabet = {byte: i for i, byte in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(tmp_path)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_run_takes_a_local_checkpoint(invoke: Invoke, checkpoint: Path) -> None:
    prompts = ("--prompt", "short", "--prompt", "one that is somewhat longer")
    result = invoke("run", "--model", checkpoint, *prompts, "--new-tokens", 20, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (model,) = shown["models"]
    assert shown["device"] == "cpu"
    assert model["name"] == checkpoint.name
    assert model["dtype"] == "bfloat16"
    assert model["batch"] == 2
    assert model["new_tokens"] == 20
    assert model["window"] == 8


def test_run_refuses_what_is_not_there(invoke: Invoke, tmp_path: Path) -> None:
    absent = next(probe for probe in dispatch.probe() if not probe.count).device.name
    assert absent in one_line_error(invoke("run", "--device", absent))
    assert "'gpu'" in one_line_error(invoke("run", "--device", "gpu"))
    assert one_line_error(invoke("run", "--model", tmp_path))
    assert invoke("run", "--model", tmp_path / "nothing").exit_code == 2


def uninstall(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make imports fail as they do where `package` is not installed."""

    class Blocker:
        @staticmethod
        def find_spec(name: str, *args: Any) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker, *sys.meta_path])


def test_run_without_transformers(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall("transformers", monkeypatch)
    assert "pip install 'portakv[run]'" in one_line_error(invoke("run"))


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_main_without_its_packages(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "portakv.cli")
    uninstall(package, monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said == f"portakv: the command line needs {package}: pip install 'portakv[run]'\n"


def test_main_lets_a_broken_import_of_ours_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "portakv.cli", None)
    with pytest.raises(ModuleNotFoundError, match=r"portakv\.cli"):
        __main__.main()


def test_store_is_measured() -> None:
    store, copy = compare.measure_store(torch.device("cpu"), tokens=64, rounds=1)
    assert store > 0
    assert copy > 0
