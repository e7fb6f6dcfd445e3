"""launch/train.py: the same weights after any start, stop or kill, and one sentence for each mistake."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import ROOT, Programs, wait_for, wait_until

SMALL = ("--model", "cnn", "--checkpoint-every", 0)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "weights.pt", weights_only=True)


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights_of(one), weights_of(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained(programs: Programs, out: Path, *arguments: object, ranks: int = 1, **environment: str) -> str:
    return programs.run("train", *arguments, "--out", out, ranks=ranks, status=0, **environment).text


def proven(programs: Programs, run: Path, bound: float = 1e-5) -> None:
    text = programs.run("prove", run, "--bound", bound, status=0).text
    assert "equal (" in text and "NOT" not in text


def images(folder: Path, number: int) -> Path:
    """A new folder of images of two classes."""
    from torchvision.transforms.functional import to_pil_image

    torch.manual_seed(0)
    for file in [folder / name / f"{i}.png" for name in ("cats", "dogs") for i in range(number)]:
        file.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(torch.rand(3, 20, 24)).save(file)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> tuple[object, ...]:
    """The options for a set of 24 images to train on, and 6 that are held out."""
    return ("--data", images(tmp_path_factory.mktemp("few"), 15), "--checkpoint-every", 0)


ENGINES = {  # which no file of configs/ has: test_launchers.py runs those
    "plain": (1, ()),
    "ddp, 3 ranks": (3, ()),
    "fsdp2, replicas": (2, ("--engine", "fsdp2", "--sync", "replicas", "--replicas", 2)),
    "accelerate": (2, ("--engine", "accelerate")),
}


@pytest.mark.parametrize(("ranks", "options"), ENGINES.values(), ids=ENGINES)
def test_engines_end_with_the_weights_of_the_big_batch(programs, tmp_path, few, ranks, options):
    sizes = ("--model", "cnn", "--batch-size", 11, "--micro-batch-size", 2, "--updates", 4)
    text = trained(programs, tmp_path / "run", *few, *sizes, *options, ranks=ranks)
    assert f"{ranks} rank" in text
    proven(programs, tmp_path / "run")
    log = log_of(tmp_path / "run")
    assert [update["index"] for update in log] == [0, 1, 2, 3]
    assert all(update["stepped"] and update["grad_norm"] > 0 for update in log)
    # The epoch ends with a short window, in which the first of three ranks has nothing.
    assert [update["counts"]["samples"] for update in log] == [11, 11, 2, 11]


def test_language_models_of_lines_paragraphs_or_a_field_of_json_lines_are_exact_in_tokens(programs, tmp_path):
    texts = [f"text {i} " + "word " * (i % 5) + "ends" for i in range(60)]
    (tmp_path / "folder").mkdir()
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "paragraphs.md").write_text("\n\n".join(texts))
    (tmp_path / "folder" / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    options = ("--task", "language", "--width", 8, "--layers", 1, "--context", 16, "--batch-size", 16)
    options = (*options, "--epochs", 1, "--data")
    for data in ("lines.txt", "paragraphs.md", "folder"):
        text = trained(programs, tmp_path / f"run {data}", *options, tmp_path / data, "--field", "body")
        assert same(tmp_path / "run lines.txt", tmp_path / f"run {data}")
    proven(programs, tmp_path / "run folder")
    assert "perplexity" in text and re.search(r"16 samples: 1 x 2 micro-batches of 8; about \d{3} tokens", text)
    counts, length = [one["counts"]["tokens"] for one in log_of(tmp_path / "run folder")], sum(map(len, texts)) + 60
    assert 0.6 * length < sum(counts) < 0.8 * length, "4 of 5 texts, without labels of the ends of rows and texts"
    assert 13 * 16 < counts[0] < 15 * 16 and len(set(counts[:3])) > 1, "rows are full"
    done = programs.run("train", *options, tmp_path / "folder")
    assert f"{tmp_path / 'folder' / 'a.jsonl'}:1 is no JSON object with a text as 'text'" in only_line(done.text)


@pytest.mark.long
def test_run_begins_with_the_weights_of_a_file(programs, tmp_path):
    """Of a network with BatchNorm and other classes, as torchvision's files are."""
    torch.manual_seed(5)
    states = pytest.importorskip("torchvision").models.resnet18(num_classes=7).state_dict()
    torch.save(states, file := tmp_path / "resnet18.pth")
    begun = ("--model", "resnet18", "--weights", file, "--precision", "float64", "--image-size", 8, "--updates", 1)
    for norm, ranks in (("frozen", 2), ("group", 1)):
        text = trained(programs, tmp_path / norm, *begun, "--norm", norm, "--lr", 1e-9, ranks=ranks)
        assert f"resnet18 on digits from {file} (but fc): " in text
        proven(programs, tmp_path / norm, 1e-10)
        found = weights_of(tmp_path / norm)
        assert (found["conv1.weight"] - states["conv1.weight"]).abs().max() < 1e-6 and len(found["fc.weight"]) == 10
        assert ("bn1.running_mean" in found) == (norm == "frozen")
    done = programs.run("train", *begun, "--model", "resnet34")
    assert "resnet18.pth' is of another model than this run's: layer 'layer1.2." in only_line(done.text)


SHORT_OF_MEMORY = """
import torch, train
def loss_of(scores, labels, whole=train.loss_of):
    if torch.is_grad_enabled() and len(labels) > 7: raise MemoryError
    return whole(scores, labels)
train.loss_of = loss_of
raise SystemExit(train.main())
"""


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "engine"), [(1, "plain"), (2, "fsdp2")])
def test_auto_halves_what_does_not_fit_and_a_resumed_run_has_the_same_bits(programs, tmp_path, few, ranks, engine):
    options = (*few, "--model", "cnn", "--batch-size", 24, "--micro-batch-size", "auto", "--engine", engine)
    options = (*options, "--schedule", "constant", "--resume")
    for out, updates in (("whole", 3), ("again", 2), ("again", 3)):
        words = ("-c", SHORT_OF_MEMORY, *options, "--updates", updates, "--out", tmp_path / out)
        programs.run(*words, ranks=ranks, status=0)
    assert same(tmp_path / "whole", tmp_path / "again")
    assert [update["micro_batches"] for update in log_of(tmp_path / "again")] == [4 // ranks] * 3, "of 6 samples"
    proven(programs, tmp_path / "again")


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "engine"), [(1, "plain"), (2, "fsdp2")])
def test_compiled_and_checkpointed_blocks_are_exact(programs, tmp_path, ranks, engine):
    file = tmp_path / "mine.toml"
    file.write_text('task = "language"\nwidth = 32\ncontext = 16\noptimizer = "adamw"\nbetas = [0.8, 0.9]\n')
    options = ("--config", file, "--engine", engine, "--precision", "float64", "--updates", 3, "--min-lr", 0.01)
    trained(programs, tmp_path / "run", *options, "--compile", "--activation-checkpointing", ranks=ranks)
    proven(programs, tmp_path / "run", 1e-10)
    assert [round(update["lr"], 6) for update in log_of(tmp_path / "run")] == [0.02, 0.0175, 0.0125]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["betas"] == [0.8, 0.9]


def save_gpt2(folder: str) -> None:
    """A small GPT-2 and a tokenizer of words of the guide; runs in a process that has imported transformers."""
    import tokenizers
    import transformers

    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    words = re.findall(r"\w+", "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))))
    numbered = {word: i for i, word in enumerate(list(dict.fromkeys(["[UNK]", *words]))[:200])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.long
def test_hugging_face_model_trains_by_its_path(programs, tmp_path):
    pytest.importorskip("tokenizers")
    code = f"from tests.launch import test_train; test_train.save_gpt2({str(tmp_path / 'model')!r})"
    programs.run("-c", code, status=0)
    options = ("--task", "language", "--context", 32, "--batch-size", 16, "--micro-batch-size", 8, "--updates", 3)
    text = trained(programs, tmp_path / "run", *options, "--model", tmp_path / "model")
    assert f"{tmp_path / 'model'} on docs: 0.05 million parameters" in text, "the model in that folder"
    assert len({update["counts"]["tokens"] for update in log_of(tmp_path / "run")}) > 1, "in its tokenizer's tokens"
    proven(programs, tmp_path / "run")


def only_line(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(("train: ", "prove: "))]
    assert "Traceback" not in text
    return line


@pytest.mark.long
def test_image_folder_is_exact_on_any_number_of_ranks(programs, tmp_path):
    data = ("--data", images(tmp_path / "images", 15), "--augment", "--epochs", 2)
    data = (*data, "--batch-size", 8, "--micro-batch-size", 2)
    for out, ranks, more in (("one", 1, ()), ("two", 2, ()), ("workers", 1, ("--workers", 2))):
        trained(programs, tmp_path / out, *SMALL, *data, "--precision", "float64", *more, ranks=ranks)
        proven(programs, tmp_path / out, 1e-10)
    assert same(tmp_path / "one", tmp_path / "workers")
    broken = tmp_path / "images" / "cats" / "3.png"
    broken.write_bytes(broken.read_bytes()[:200])
    words = ("train", *SMALL, *data, "--workers", 1, "--out", tmp_path / "broken")
    text = programs.run(*words, ranks=2, status=1).of_all
    assert f"{broken} is no image that can be read" in text and "Traceback" not in text


def test_batchnorm_prints_that_updates_cannot_be_exact(programs, tmp_path):
    text = trained(programs, tmp_path / "run", *SMALL, "--norm", "batch", "--updates", 2)
    assert "no update equals that of the big batch" in text
    assert "normalise each micro-batch" in text  # the library's own warning, with the layers' names
    text = programs.run("prove", tmp_path / "run", status=1).text
    assert "NOT EQUAL" in text and "--norm group is exact" in text


@pytest.mark.long
@pytest.mark.parametrize(("engine", "precision"), [("ddp", "bf16"), ("fsdp2", "fp16"), ("deepspeed", "bf16")])
def test_mixed_precision_trains(programs, tmp_path, engine, precision):
    options = ("--engine", engine, "--precision", precision, "--updates", 12, "--lr", 0.1)
    text = trained(programs, tmp_path / "run", *SMALL, *options, ranks=2)
    losses = [update["loss"] for update in log_of(tmp_path / "run") if update["stepped"]]
    assert losses[-1] < 0.8 * losses[0], text
    programs.run("prove", tmp_path / "run", status=2)


def test_option_on_the_command_line_beats_the_file(programs, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('batch_size = 32\nmicro_batch_size = 4\nmodel = "cnn"\nlr = 1\n')
    done = programs.run("train", "--config", file, "--batch-size", 96, "--plan", 3, status=0)
    assert "an update is 96 samples: 3 x 8 micro-batches of 4" in done.text
    assert programs.run("train", "--config", file, "--plan").text.count("32 samples: 1 x 8") == 1
    file.write_text('model = "cnn"\nupdates = 7\n')
    assert "46 updates, 23 per epoch" in programs.run("train", "--config", file, "--epochs", 2, "--plan").text


TEXT = ("--task", "language", "--plan", "4")
MISTAKES = {
    ("--batchsize", "3"): "'--batchsize' is not known (did you mean --batch-size?)",
    ("--config", "unknown.toml"): "unknown.toml: '--batch' is not known (did you mean",
    ("--config", "both.toml"): "both.toml: both epochs and updates are given, expected one of them",
    ("--batch-size", "3", "--micro-batch-size", "1", "--plan", "2"): "give a batch_size that 2 divides, such as 4",
    ("--replicas", "2", "--engine", "fsdp2", "--plan", "3"): "replicas = 2 on 3 ranks, expected a number that divides",
    ("--config", "table.toml"): "table.toml: [train] is a table, expected flat options: name = value",
    ("--config", "quoted.toml"): "quoted.toml: batch_size = '64', expected 64",
    ("--epochs", "0", "--updates", "0"): "epochs = 0, expected a number above 0; updates= ends a run sooner",
    ("--micro-batch-size", "foo"): "argument --micro-batch-size: 'foo', expected a whole number or auto",
    ("--norm", "frozen"): "norm = 'frozen' keeps statistics that nobody has measured; give weights with some",
    ("--task", "language", "--model", "resnet18"): "model = 'resnet18' is a torchvision model; give task = 'vision'",
    ("--model", "resnet17"): "model = 'resnet17' is no torchvision model; there are resnet",
    ("--model", "alexnet"): "alexnet on digits: the model does not take a sample of this data (Given input size",
    ("--data", "one"): "is no folder of images by class, nor one with train and val",
    ("--task", "language", "--model", "./not-there"): "no language model that transformers finds",
    ("--device", "cuda"): "torch sees no GPU here",
    ("--sync", "gathered"): "sync='gathered'",
    ("--engine", "deepspeed", "--deepspeed-config", "bf16.json"): "precision is 'float32'; leave it out",
    ("--out", "file/run"): "file/run cannot be made (Not a directory); give another --out",
    ("--out", "used"): "holds a run already; go on with it by --resume, or give another --out",
    ("--checkpoint-minutes", "-1"): "checkpoint_minutes = -1.0, expected a number of at least 0",
    ("--optimizer", "adamw", "--betas", "0.9", "1"): "betas = (0.9, 1.0), expected two numbers from 0 to below 1",
    ("--min-lr", "1"): "min_lr = 1.0 and lr = 0.02, expected a min_lr of at most lr",
    ("--model", "cnn", "--evaluate-only"): "evaluate_only of weights that nobody has trained; give weights, or resume",
    ("--model", "cnn", "--activation-checkpointing"): "activation_checkpointing with cnn, which has no blocks",
    ("--tp", "2", "--plan", "4"): "tp = 2 with model = 'resnet18', expected task = 'language' and 'gpt'",
    (*TEXT, "--tp", "3"): "tp = 3 and 4 ranks, expected a number that divides them",
    (*TEXT, "--tp", "2", "--measure-noise"): "tp = 2 with measure_noise, expected one of them",
    (*TEXT, "--tp", "2", "--engine", "ddp"): "tp = 2 with engine = 'ddp', expected 'fsdp2'",
    (*TEXT, "--tp", "4", "--width", "96"): "tp = 4 and width = 96, which makes 3 heads, expected a number that",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_mistakes_print_one_line_and_exit_with_status_2(programs, tmp_path, arguments):
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    (tmp_path / "unknown.toml").write_text("batch = 3\n")
    (tmp_path / "table.toml").write_text("[train]\nepochs = 3\n")
    (tmp_path / "quoted.toml").write_text('batch_size = "64"\n')
    (tmp_path / "both.toml").write_text("updates = 3\nepochs = 3\n")
    (tmp_path / "bf16.json").write_text('{"bf16": {"enabled": true}}')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "log.jsonl").write_text('{"index": 0}\n')
    (tmp_path / "file").touch()
    (tmp_path / "one" / "train" / "cats").mkdir(parents=True)
    done = programs.start("train", *arguments, cwd=tmp_path).wait()
    assert done.status == 2, done.text
    assert MISTAKES[arguments] in only_line(done.text)
    assert not list(tmp_path.glob("runs/*/*")), "nothing is written"


def test_ranks_print_a_mistake_once(programs):
    assert programs.run("train", "--batch-size", 1, ranks=2, status=2).of_all.count("train: ") == 1


def test_run_leaves_a_log_a_summary_and_a_picture(programs, tmp_path):
    run = tmp_path / "run"
    sizes = ("--batch-size", 256, "--micro-batch-size", 64)
    text = trained(programs, run, *SMALL, *sizes, "--epochs", 2, "--evaluate-every", 5, "--warmup", 5)
    log = log_of(run)
    assert len(log) == 12
    fields = "index loss losses grad_norm counts micro_batches stepped reason seconds lr samples_per_second peak_memory"
    assert set(fields.split()) <= log[0].keys()
    assert [round(update["lr"], 4) for update in log[:6]] == [0.004, 0.008, 0.012, 0.016, 0.02, 0.02]
    assert log[-1]["lr"] < 1e-3
    measured = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [point["updates"] for point in measured] == [5, 10, 12]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 12 and summary["held_out"]["accuracy"] == measured[-1]["accuracy"]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    printed = re.findall(r"^after (\d+) updates: loss .*, accuracy .*%, \d+ samples/s, peak \d.\d\d GB$", text, re.M)
    assert printed == ["5", "10", "12"]


def test_best_weights_are_kept_and_measured_alone(programs, tmp_path):
    run = tmp_path / "run"
    options = (*SMALL, "--updates", 6, "--lr", 1, "--max-norm", 0)
    trained(programs, run, *options, "--evaluate-every", 1, "--best", ranks=2)
    losses = [json.loads(line)["loss"] for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert min(losses) < losses[-1]
    for name, loss in (("best", min(losses)), ("weights", losses[-1])):
        weights = ("--evaluate-only", "--weights", run / f"{name}.pt")
        assert f"held out: loss {loss:.4f}" in trained(programs, tmp_path / "none", *options, *weights)
    assert f"held out: loss {losses[-1]:.4f}" in trained(programs, run, *options, "--evaluate-only", "--resume")
    done = programs.start("train", *options, "--evaluate-only", "--resume", cwd=tmp_path).wait()
    assert (done.status, "no checkpoint in runs/train/checkpoints to evaluate" in done.text) == (2, True), done.text
    assert not (tmp_path / "none").exists()


CNN = ("--model", "cnn")
WITH_DROPOUT = ("--model", "squeezenet1_1", "--image-size", 32)
ADAMW = ("--optimizer", "adamw", "--lr", 0.001)
KEPT = {
    "adamw on ddp": (2, (*WITH_DROPOUT, *ADAMW)),
    "fp16": (1, (*CNN, "--precision", "fp16")),
    "accelerate": (2, (*CNN, "--engine", "accelerate")),
    "zero 3": (2, (*CNN, "--engine", "deepspeed", "--stage", 3, *ADAMW)),
}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "options"), KEPT.values(), ids=KEPT)
def test_resumed_run_has_the_same_bits(programs, tmp_path, few, ranks, options):
    """A checkpoint in the middle of an epoch, and the end in the next."""
    options = (*few, *options, "--batch-size", 8, "--micro-batch-size", 2, "--updates", 4)
    options = (*options, "--checkpoint-every", 2, "--keep", 9)
    trained(programs, tmp_path / "whole", *options, ranks=ranks)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "update-00000004")
    (tmp_path / "again" / "weights.pt").unlink()
    text = trained(programs, tmp_path / "again", *options, "--evaluate-every", 1, "--resume", ranks=ranks)
    assert "goes on with update 2" in text and "2 updates in" in text
    assert same(tmp_path / "whole", tmp_path / "again")
    logs = [[(one["index"], one["loss"]) for one in log_of(tmp_path / name)] for name in ("whole", "again")]
    assert logs[0] == logs[1]


def test_resumed_run_may_change_engine_and_ranks(programs, tmp_path, few):
    sizes = ("--batch-size", 11, "--micro-batch-size", 2)
    options = (*few, *CNN, *sizes, "--precision", "float64", "--schedule", "constant")
    trained(programs, tmp_path / "run", *options, "--updates", 1, ranks=2)
    trained(programs, tmp_path / "run", *options, "--updates", 2, "--engine", "fsdp2", "--resume", ranks=2)
    text = trained(programs, tmp_path / "run", *options, "--updates", 4, "--resume", ranks=1)
    assert "the state is of 2 ranks and this job has 1" in text
    trained(programs, tmp_path / "run", *options, "--updates", 6, "--resume", ranks=3)
    proven(programs, tmp_path / "run", 1e-10)


def test_nonfinite_loss_prints_one_line_and_checkpoints_stay(programs, tmp_path):
    options = (*SMALL, "--updates", 5, "--checkpoint-every", 1, "--max-norm", 0, "--schedule", "constant")
    done = programs.run("train", *options, "--lr", 1e30, "--out", tmp_path / "run", status=1)
    line = only_line(done.text)
    assert "is not finite" in line and "--resume goes on from it" in line
    text = trained(programs, tmp_path / "skip", *options, "--lr", 1e30, "--on-nonfinite", "skip")
    assert "was skipped: a gradient is not finite" in text
    last = log_of(tmp_path / "skip")[-1]
    assert not last["stepped"] and last["loss"] is None
    for file in ("log.jsonl", "evaluation.jsonl", "summary.json"):
        assert "NaN" not in (tmp_path / "skip" / file).read_text()


RESUMED = (*SMALL, "--schedule", "constant", "--resume")


@pytest.fixture(scope="module")
def two_updates(programs, tmp_path_factory) -> Path:
    """A run that ended after two updates; one that asked for a checkpoint, of which there was none."""
    run = tmp_path_factory.mktemp("two updates") / "run"
    assert "no checkpoint in" in trained(programs, run, *RESUMED, "--updates", 2)
    return run


@pytest.fixture
def ended(two_updates, tmp_path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(two_updates, tmp_path / "run"))


def test_resume_prints_the_checkpoint_that_it_found(programs, ended):
    summary = (ended / "summary.json").read_text()
    assert "nothing left to do: 2 updates are done" in trained(programs, ended, *RESUMED, "--updates", 2)
    assert (ended / "summary.json").read_text() == summary
    done = programs.run("train", *RESUMED, "--batch-size", 32, "--updates", 4, "--out", ended, status=2)
    assert "was made with batch_size = 64 and this run has 32; give the same, or another --out" in done.text
    programs.run("train", *RESUMED, "--seed", 3, "--out", ended, ranks=2, status=2)


def test_checkpoint_that_cannot_be_read_is_named(programs, ended):
    state = ended / "checkpoints" / "update-00000002" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    stopped = programs.run("train", *RESUMED, "--updates", 2, "--out", ended, ranks=2, status=2)
    assert f"{state.parent} cannot be read (" in stopped.of_all


def test_checkpoint_that_a_kill_left_unfinished_is_skipped(programs, ended):
    partial = ended / "checkpoints" / ".update-00000003"
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half")
    with (ended / "log.jsonl").open("a") as log:
        log.write('{"index": 2, "loss": 1.0}\n{"index": 3, "lo')
    trained(programs, ended, *RESUMED, "--updates", 4)
    assert not partial.exists()
    assert [update["index"] for update in log_of(ended)] == [0, 1, 2, 3]
    proven(programs, ended)


@pytest.mark.long
def test_run_saves_after_the_update_on_a_signal(programs, tmp_path, few):
    """The last rank alone gets it; the resumed run ends with the same bits, also with dropout."""
    sizes = ("--batch-size", 24, "--micro-batch-size", 1, "--updates", 2)
    options = (*few, *WITH_DROPOUT, *sizes, "--engine", "fsdp2")
    trained(programs, tmp_path / "whole", *options, ranks=2)
    run = tmp_path / "run"
    started = programs.start_ranks(2, "train", *options, "--out", run)
    # It is written once signals are handled, right before the first micro-step.
    wait_until((run / "config.json").exists, started[0])
    started[-1].send(signal.SIGTERM)
    ended = wait_for(started)
    assert [done.status for done in ended] == [128 + signal.SIGTERM] * 2, ended[0].text
    assert "stopped by SIGTERM after 1 updates, and saved" in ended[0].text
    assert "goes on with update 1" in trained(programs, run, *options, "--resume", ranks=2)
    assert same(tmp_path / "whole", run)
    assert [one["loss"] for one in log_of(run)] == [one["loss"] for one in log_of(tmp_path / "whole")]


def test_clock_of_the_first_rank_asks_all_to_save(programs, tmp_path):
    options = (*SMALL, "--updates", 2, "--keep", 9, "--checkpoint-minutes", 1e-6)
    trained(programs, tmp_path / "run", *options, ranks=2)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["update-00000001", "update-00000002"]


def test_ranks_name_the_loss_of_another(programs, tmp_path):
    started = programs.start_ranks(2, "train", *SMALL, "--updates", 10**5, "--timeout", 0.5, "--out", tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    assert wait_until(lambda: log.exists() and log.read_text(), started[0])
    started[1].send(signal.SIGKILL)
    survivor = started[0].wait()
    assert survivor.status == 1
    line = only_line(survivor.text)
    assert "rank 0 lost contact with the other ranks" in line and "--resume goes on from it" in line
